// The method "fp8" of models whose routed experts are e2m1 beside e4m3 in all else (DeepSeek-V4).
// A layer has one kind of codes: e4m3 has all values of e2m1, and a group of 32 columns lies within
// a block of 128 x 128, so that both are e4m3 in such groups, to the bit.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/shared_planes.h"
#include "core/checked.h"
#include "core/code_bits.h"
#include "core/float8.h"
#include "quant/weight_format.h"

#include <algorithm>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kGroup = 32;

void decode_codes(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  const quant::WeightFormat& pairs = quant::format_of(DType::kF4);
  std::array<std::byte, 16> codes{};
  for (uint8_t code = 0; code < codes.size(); ++code) {
    codes[code] = static_cast<std::byte>(float_to_e4m3(pairs.codes->decode(code)));
  }
  const int64_t row_bytes = ceil_div(form.cols, 2);
  for (int64_t row = 0; row < form.rows; ++row) {
    const std::byte* const stored = inputs[0].bytes.data() + row * row_bytes;
    std::byte* const line = plane.data() + row * form.cols;
    for (int64_t col = 0; col < form.cols; ++col) line[col] = codes[code_at(stored, col, 4)];
  }
}

// Scales of groups, or of blocks, each of which is that of all its groups.
StoredShapes scale_shapes(const MatrixForm& form) {
  return {{form.rows, form.groups}, {ceil_div(form.rows, kBlock), ceil_div(form.cols, kBlock)}};
}
void decode_scales(const MatrixForm& form, std::span<const PlaneInput> inputs,
                   std::span<std::byte> plane) {
  const std::span<const std::byte> stored = inputs[0].bytes;
  if (stored.size() == plane.size()) {
    std::ranges::copy(stored, plane.begin());
    return;
  }
  const int64_t blocks = ceil_div(form.cols, kBlock);
  for (int64_t row = 0; row < form.rows; ++row) {
    for (int64_t group = 0; group < form.groups; ++group) {
      const int64_t at = row / kBlock * blocks + group * kGroup / kBlock;
      plane[static_cast<size_t>(row * form.groups + group)] = stored[static_cast<size_t>(at)];
    }
  }
}

constexpr std::array kPlanes = {
    StoredPlane{.suffix = ".weight",
                .types = kPairTypes,
                .shapes = pair_shapes,
                .has_codes = has_pairs,
                .decode = decode_codes},
    StoredPlane{.suffix = ".scale",
                .plane = WeightPlane::kScale,
                .types = kExponentTypes,
                .shapes = scale_shapes,
                .type = DType::kF8E8M0,
                .decode = decode_scales},
};

}  // namespace

QuantizedWeights read_fp4_experts(const io::JsonValue& config) {
  QuantizedWeights weights = read_fp8(config);
  const QuantSpec& dense = weights.spec;
  const bool blocks = dense.weights == WeightScale::kBlock && dense.block_rows == kBlock &&
                      dense.block_cols == kBlock;
  if (!blocks) throw NotRead{"fp4 experts beside blocks of another size than 128 x 128"};
  set_block(weights.spec, 1, kGroup);
  weights.planes = kPlanes;
  return weights;
}

}  // namespace conclave::inline v0::checkpoint
