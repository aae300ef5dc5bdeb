#include "conclave/interop/mpi.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/structs.h"
#include "capi/values.h"

conclave_status conclave_communicator_from_mpi(const void* mpi_comm, int64_t timeout_ms,
                                               conclave_communicator** out) noexcept {
  namespace capi = conclave::capi;
  return capi::guarded([&] {
    const auto* const communicator = static_cast<const MPI_Comm*>(mpi_comm);
    capi::required(communicator, "mpi_comm");
    capi::required(out, "out");
    capi::check_aligned("mpi_comm", communicator, alignof(MPI_Comm));
    capi::hand_out(out, conclave::make_mpi_communicator(
                            *communicator, capi::timeout_of("timeout_ms", timeout_ms)));
  });
}
