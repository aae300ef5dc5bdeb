#include "experts/cuda/sm90/hopper_support.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::experts {

Support supports_on_hopper(const ExpertsProblem& problem, std::initializer_list<DType> weights) {
  if (!problem.gpu().is_hopper()) {
    return Support::no("needs compute capability 9.0; found " +
                       std::to_string(problem.gpu().compute_major) + "." +
                       std::to_string(problem.gpu().compute_minor));
  }
  if (std::find(weights.begin(), weights.end(), problem.weight_dtype) != weights.end()) {
    return Support::yes();
  }
  std::string accepted;
  for (const DType dtype : weights) {
    accepted += (accepted.empty() ? "" : " or ") + std::string(to_string(dtype));
  }
  return Support::no("takes " + accepted + " weights; found " +
                     std::string(to_string(problem.weight_dtype)));
}

}  // namespace conclave::inline v0::experts
