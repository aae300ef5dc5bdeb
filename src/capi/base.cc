#include "conclave/c/base.h"

#include "capi/guard.h"
#include "capi/structs.h"
#include "capi/values.h"

#include "conclave/c/tensor.h"
#include "conclave/version.h"

#include <string_view>

static_assert(std::string_view(CONCLAVE_C_VERSION) == CONCLAVE_VERSION_STRING);

namespace capi = conclave::capi;

int32_t conclave_interface() noexcept { return CONCLAVE_C_INTERFACE; }

const char* conclave_version() noexcept { return conclave::build_info().version; }

conclave_status conclave_get_build(conclave_build* build) noexcept {
  return capi::guarded([&] {
    const conclave::BuildInfo& info = conclave::build_info();
    capi::fill(capi::fillable(build, "build"), {.struct_size = 0,
                                                .version = info.version,
                                                .commit = info.commit,
                                                .compiler = info.compiler,
                                                .build_type = info.build_type,
                                                .features = info.features});
  });
}

conclave_status conclave_dtype_bits(conclave_dtype dtype, int64_t* bits) noexcept {
  return capi::guarded([&] {
    int64_t& to = capi::required(bits, "bits");
    to = conclave::bit_size(capi::dtype_of("dtype", dtype));
  });
}
