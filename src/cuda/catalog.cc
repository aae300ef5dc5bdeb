// Only this file of the folder depends on the build's options.
#include "core/build_config.h"
#include "cuda/architecture.h"

#if CONCLAVE_BUILD_CUDA
#include <array>
#endif

namespace conclave::inline v0::cuda {

std::span<const Architecture> plain_architectures() {
#if CONCLAVE_BUILD_CUDA
  static constexpr std::array kArchitectures = {CONCLAVE_BUILD_CUDA_CODE};
  return kArchitectures;
#else
  return {};
#endif
}

}  // namespace conclave::inline v0::cuda
