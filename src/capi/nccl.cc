#include "conclave/interop/nccl.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/structs.h"
#include "capi/values.h"

conclave_status conclave_communicator_from_nccl(void* nccl_comm, conclave_communicator* bootstrap,
                                                int64_t timeout_ms,
                                                conclave_communicator** out) noexcept {
  namespace capi = conclave::capi;
  return capi::guarded([&] {
    auto* const communicator = static_cast<ncclComm*>(nccl_comm);
    if (communicator == nullptr) capi::throw_null("nccl_comm");
    conclave::Communicator& ranks = *capi::required(bootstrap, "bootstrap").communicator;
    capi::required(out, "out");
    capi::hand_out(out, conclave::make_nccl_communicator(
                            communicator, ranks, capi::timeout_of("timeout_ms", timeout_ms)));
  });
}
