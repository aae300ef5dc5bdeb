#include "conclave/version.h"

#include "core/build_config.h"

namespace conclave::inline v0 {

const BuildInfo& build_info() noexcept {
  static constexpr BuildInfo kInfo = {
      .version = CONCLAVE_VERSION_STRING,
      .commit = CONCLAVE_BUILD_COMMIT,
      .compiler = CONCLAVE_BUILD_COMPILER,
      .build_type = CONCLAVE_BUILD_TYPE,
      .features = CONCLAVE_BUILD_FEATURES,
  };
  return kInfo;
}

}  // namespace conclave::inline v0
