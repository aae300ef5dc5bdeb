#include "experts/cuda/sm90/hopper_support.h"

#include "core/weight_types.h"
#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/factor_planes.h"
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
  if (problem.quant.zeros != WeightZero::kNone) return Support::no("takes codes without zeros");
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

}  // namespace conclave::inline v0::experts
