// "cuda.tile_fp8_sm90" and "cuda.tile_int8_sm90": weights and activations of e4m3, or of int8, with
// many rows per expert; "cuda.tile_fp4_fp8_sm90": the same of rows of e4m3 and of mxfp4 weights,
// which become e5m2 on their way. Two products of 256-token tiles, 128 tokens per block; compute
// bound. The kernel is in tile_bytes.cuh.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0::experts {

// Layout of a workspace, in bytes. The counters share its first 256 bytes; every later part is
// 256-byte aligned.
struct TileBytesWorkspace {
  int64_t code_stride = 0;   // elements per row of codes or float32: I rounded up to 16
  int64_t scale_groups = 0;  // ceil(I / 128) with block scales, 1 with dynamic row scales, else 0
  int64_t scale_stride = 0;  // elements: rows rounded up to a multiple of 4
  size_t tickets = 0;        // counter from which the up product's items are drawn
  size_t down_tickets = 0;   // the same of the down product
  size_t ended = 0;          // count of the down product's blocks that have ended
  size_t codes = 0;          // [rows, code_stride]
  size_t scales = 0;         // [scale_groups, scale_stride] float32
  size_t values = 0;         // [rows, code_stride] float32, only with dynamic row scales
  size_t bytes = 0;
};
TileBytesWorkspace tile_bytes_workspace(const ExpertsProblem& problem, int64_t rows);
size_t tile_bytes_memory(const ExpertsProblem& problem, int64_t tokens);

// The token tiles of an expert that are walked together, in a product over `depth` columns whose
// weights are `feature_tiles` of 256 rows: 1 where L2 holds an expert's weights from one token tile
// to the next.
int32_t tile_bytes_group(int64_t feature_tiles, int64_t depth, int64_t l2_bytes);

Support tile_fp8_supports(const ExpertsProblem& problem);
Support tile_int8_supports(const ExpertsProblem& problem);
Support tile_fp4_fp8_supports(const ExpertsProblem& problem);
std::span<const DeviceTile> tile_bytes_tiles(const ExpertsProblem& problem);
std::span<const DeviceTile> tile_fp4_fp8_tiles(const ExpertsProblem& problem);
std::unique_ptr<DeviceExpertsKernel> make_tile_fp8(const ExpertsProblem& problem,
                                                   const DeviceExperts& weights,
                                                   const DeviceTile& tile);
std::unique_ptr<DeviceExpertsKernel> make_tile_int8(const ExpertsProblem& problem,
                                                    const DeviceExperts& weights,
                                                    const DeviceTile& tile);
std::unique_ptr<DeviceExpertsKernel> make_tile_fp4_fp8(const ExpertsProblem& problem,
                                                       const DeviceExperts& weights,
                                                       const DeviceTile& tile);

}  // namespace conclave::inline v0::experts
