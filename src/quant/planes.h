// The planes of a matrix in memory: which there are, how large they are, and which part of each a
// block of the matrix needs. Sources, checks, packing, upload and counts ask here.
#pragma once

#include "conclave/spec.h"
#include "conclave/weights.h"

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace conclave::inline v0::quant {

// The planes that give codes a meaning; which of them a matrix has depends on its format.
inline constexpr std::array kCodePlanes = {WeightPlane::kScale,       WeightPlane::kZero,
                                           WeightPlane::kSecondScale, WeightPlane::kGlobalScale,
                                           WeightPlane::kInputScale,  WeightPlane::kColumnOrder,
                                           WeightPlane::kColumnFactor};
constexpr bool is_code_plane(std::optional<WeightPlane> plane) {
  return plane && *plane != WeightPlane::kWeights && *plane != WeightPlane::kBias;
}

// Planes with a number for each column, which gate and up may share in one tensor.
constexpr bool is_by_column(WeightPlane plane) {
  return plane == WeightPlane::kColumnOrder || plane == WeightPlane::kColumnFactor;
}

// Planes of one number for a matrix.
constexpr bool is_single(WeightPlane plane) {
  return plane == WeightPlane::kGlobalScale || plane == WeightPlane::kInputScale;
}

enum class PlaneType : uint8_t {
  kWeights,  // the type of the matrix
  kFloat,    // f32, f16 or bf16
  kScale,    // f32, f16, bf16, e8m0 or e4m3
  kIndex,    // int32 or int64
};

// A plane [rows, cols], each element of which belongs to block_rows x block_cols of the matrix; the
// last ones of a row or column may belong to fewer.
struct PlaneShape {
  WeightPlane plane = WeightPlane::kWeights;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t block_rows = 1;
  int64_t block_cols = 1;
  PlaneType type = PlaneType::kWeights;
  // Whether the plane is one number for the matrix, which matrices fused in one tensor may share.
  bool is_single = false;
  // Whether a source may leave it out.
  bool is_optional = false;
};

// The planes of a matrix [rows, cols] of values or codes, kWeights first; but for the bias, which
// depends on no format.
std::vector<PlaneShape> planes_of(DType dtype, const QuantSpec& quant, int64_t rows, int64_t cols);
PlaneShape bias_of(int64_t rows);
// One of them, which the matrix must have.
PlaneShape plane_of(WeightPlane plane, DType dtype, const QuantSpec& quant, int64_t rows,
                    int64_t cols);

// A block of the matrix needs this much of a plane. Elements belong to the matrix as a whole, so
// the block may begin inside the first one: `skipped` rows and columns of the matrix precede it
// there.
struct PlaneSlice {
  WeightBlock block;
  int64_t skipped_rows = 0;
  int64_t skipped_cols = 0;
};
PlaneSlice slice(const PlaneShape& plane, const WeightBlock& block);

}  // namespace conclave::inline v0::quant
