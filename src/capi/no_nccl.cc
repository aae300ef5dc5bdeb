#include "capi/guard.h"
#include "capi/structs.h"

#include "conclave/c/communicator.h"
#include "conclave/error.h"

conclave_status conclave_communicator_from_nccl(void* nccl_comm, conclave_communicator* bootstrap,
                                                int64_t /*timeout_ms*/,
                                                conclave_communicator** out) noexcept {
  namespace capi = conclave::capi;
  return capi::guarded([&] {
    capi::required(static_cast<const char*>(nccl_comm), "nccl_comm");
    if (bootstrap == nullptr) capi::throw_null("bootstrap");
    capi::required(out, "out");
    throw conclave::Error(conclave::ErrorCode::kUnsupported,
                          {.what = "this build has no CUDA support, and so no NCCL",
                           .hint = "conclave_transports_json has the reason"});
  });
}
