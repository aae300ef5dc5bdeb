#include "capi/guard.h"
#include "capi/structs.h"

#include "conclave/c/communicator.h"
#include "conclave/error.h"

conclave_status conclave_communicator_from_mpi(const void* mpi_comm, int64_t /*timeout_ms*/,
                                               conclave_communicator** out) noexcept {
  namespace capi = conclave::capi;
  return capi::guarded([&] {
    capi::required(static_cast<const char*>(mpi_comm), "mpi_comm");
    capi::required(out, "out");
    throw conclave::Error(
        conclave::ErrorCode::kUnsupported,
        {.what = "this build has no MPI", .hint = "conclave_transports_json has the reason"});
  });
}
