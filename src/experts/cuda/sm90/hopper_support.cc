#include "experts/cuda/sm90/hopper_support.h"

#include "core/weight_types.h"
#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/factor_planes.h"
#include "quant/activation_rows.h"
#include "quant/gpu_rows.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::experts {

Support is_hopper(const cuda::DeviceInfo& device) {
  if (device.capability != cuda::kHopper) {
    return Support::no("needs compute capability " + to_string(cuda::kHopper) + "; found " +
                       to_string(device.capability));
  }
  constexpr auto kNeeded = static_cast<int64_t>(kMostSharedBytes);
  if (device.shared_bytes_per_block >= kNeeded) return Support::yes();
  return Support::no("needs " + std::to_string(kNeeded) + " bytes of shared memory; a block has " +
                     std::to_string(device.shared_bytes_per_block));
}

Support supports_codes_as_stored(const ExpertsProblem& problem) {
  if (Support rows = quant::code_rows_support(problem.weight_dtype, problem.quant); !rows) {
    return rows;
  }
  const QuantSpec& quant = problem.quant;
  if (quant.zeros != WeightZero::kNone) return Support::no("takes codes without zeros");
  if (quant.has_column_order) return Support::no("takes codes whose columns have no order");
  if (quant.has_column_factors) return Support::no("takes rows without factors of columns");
  return begins_with_block(problem);
}

Support supports_on_hopper(const ExpertsProblem& problem, std::initializer_list<DType> weights) {
  if (Support device = is_hopper(problem.gpu()); !device) return device;
  if (std::find(weights.begin(), weights.end(), problem.weight_dtype) != weights.end()) {
    return is_plain(problem.weight_dtype) ? Support::yes() : supports_codes_as_stored(problem);
  }
  std::string accepted;
  for (const DType dtype : weights) {
    accepted += (accepted.empty() ? "" : " or ") + std::string(to_string(dtype));
  }
  return Support::no("takes " + accepted + " weights; found " +
                     std::string(to_string(problem.weight_dtype)));
}

namespace {

Support supports_blocks(const QuantSpec& quant) {
  if (quant.block_rows != kScaleGroup || quant.block_cols != kScaleGroup) {
    return Support::no("takes weight blocks of 128x128; found " + std::to_string(quant.block_rows) +
                       "x" + std::to_string(quant.block_cols));
  }
  if (quant.activations != ActivationScale::kGroup) {
    return Support::no("takes block weights with a scale per 128 activations only");
  }
  return Support::yes();
}

// Codes that are whole numbers add up in 32 bits.
Support supports_whole_sums(const ExpertsProblem& problem) {
  constexpr int64_t kMostColumns = (int64_t{1} << 17) - 1;  // products are up to 2^14
  if (problem.quant.weights == WeightScale::kBlock) {
    return Support::no("takes one scale for each weight row; found blocks");
  }
  const int64_t columns = std::max(problem.hidden_size, problem.intermediate_size);
  if (columns <= kMostColumns) return Support::yes();
  return Support::no("adds up to " + std::to_string(kMostColumns) + " columns in int32; found " +
                     std::to_string(columns));
}

}  // namespace

Support supports_bytes(const ExpertsProblem& problem, DType codes) {
  if (Support hopper = supports_on_hopper(problem, {codes}); !hopper) return hopper;
  const QuantSpec& quant = problem.quant;
  if (quant::activation_rule(codes, quant).is_exact()) {
    if (Support sums = supports_whole_sums(problem); !sums) return sums;
  }
  if (quant.weights == WeightScale::kNone) return Support::no("takes weights with scales");
  if (quant.weights == WeightScale::kBlock) return supports_blocks(quant);
  if (quant.activations == ActivationScale::kToken ||
      quant.activations == ActivationScale::kTensorStatic) {
    return Support::yes();
  }
  return Support::no("takes row weights with one scale per activation row only");
}

}  // namespace conclave::inline v0::experts
