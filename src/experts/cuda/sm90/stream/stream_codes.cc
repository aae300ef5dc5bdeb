#include "experts/cuda/sm90/stream/stream_codes.h"

#include "core/checked.h"
#include "experts/cuda/sm90/hopper_support.h"
#include "quant/weight_format.h"

#include <array>
#include <string>

namespace conclave::inline v0::experts {
namespace {

// stream_codes.cu has a kernel for each of these, with the stages that shared memory has room for.
constexpr std::array kFourBitTiles = {
    DeviceTile{.tokens = 16, .features = 128, .depth = 128, .stages = 5},
    DeviceTile{.tokens = 32, .features = 128, .depth = 128, .stages = 4},
    DeviceTile{.tokens = 64, .features = 128, .depth = 128, .stages = 3},
    DeviceTile{.tokens = 96, .features = 128, .depth = 128, .stages = 2},
};
// With scales of 16 columns.
constexpr std::array kFineTiles = {kFourBitTiles[0], kFourBitTiles[2]};
constexpr std::array kEightBitTiles = {
    DeviceTile{.tokens = 16, .features = 128, .depth = 128, .stages = 7},
    DeviceTile{.tokens = 32, .features = 128, .depth = 128, .stages = 6},
    DeviceTile{.tokens = 64, .features = 128, .depth = 128, .stages = 5},
    DeviceTile{.tokens = 96, .features = 128, .depth = 128, .stages = 4},
};

// wgmma multiplies 16 columns at once.
constexpr int64_t kColumnsOfStep = 16;

Support supports_groups(const ExpertsProblem& problem) {
  const int64_t group = columns_of_group(problem);
  if (group == 0) return Support::yes();
  const int64_t stage = columns_of_stage(problem);
  if (group % kColumnsOfStep != 0 || (stage % group != 0 && group % stage != 0)) {
    return Support::no("takes scales of 16, 32, 64, 128 or whole multiples of " +
                       std::to_string(stage) + " columns; found " + std::to_string(group));
  }
  if (group == kColumnsOfStep && bit_size(problem.weight_dtype) != 4) {
    return Support::no("takes scales of 16 columns beside codes of 4 bits");
  }
  if (group == kColumnsOfStep && problem.quant.zeros != WeightZero::kNone) {
    return Support::no("takes zero points of 32 or more columns; found 16");
  }
  if (problem.skipped_columns % group != 0) {
    return Support::no("a slice begins inside a group of columns that share a scale");
  }
  return Support::yes();
}

}  // namespace

Support stream_codes_supports(const ExpertsProblem& problem) {
  if (Support device = is_hopper(problem.gpu()); !device) return device;
  const quant::WeightFormat* format = quant::find_format(problem.weight_dtype);
  if (format == nullptr || format->codes == nullptr) {
    return Support::no("takes weights that are codes; found " +
                       std::string(conclave::to_string(problem.weight_dtype)));
  }
  if (!format->codes->exact_in_bf16) {
    return Support::no("takes codes whose values bf16 holds");
  }
  const QuantSpec& quant = problem.quant;
  // Sums of other values and a zero point may have more bits than bf16.
  if (quant.zeros == WeightZero::kPoint && !format->codes->whole.fit) {
    return Support::no("takes zero points beside codes that stand for whole numbers");
  }
  if (quant.activations != ActivationScale::kNone) {
    return Support::no("takes rows that are not quantised");
  }
  if (quant.weights == WeightScale::kNone) return Support::no("takes weights with scales");
  if (quant.zeros == WeightZero::kOffset) {
    return Support::no("takes zero points, not offsets in the unit of the weights");
  }
  if (quant.has_column_order) return Support::no("does not support a column order");
  return supports_groups(problem);
}

std::span<const DeviceTile> stream_codes_tiles(const ExpertsProblem& problem) {
  if (columns_of_group(problem) == kColumnsOfStep) return kFineTiles;
  if (bit_size(problem.weight_dtype) == 4) return kFourBitTiles;
  return kEightBitTiles;
}

size_t stream_codes_bytes(const ExpertsProblem& problem, int64_t tokens) {
  return static_cast<size_t>(tokens * problem.top_k * round_up(problem.intermediate_size, 8) *
                             byte_size(DType::kBF16));
}

}  // namespace conclave::inline v0::experts
