// Ranks that are processes which an MPI launcher started.
#pragma once

#include "comm/mpi/mpi_runtime.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

Support mpi_supports(const ConnectOptions& options);
std::string mpi_library();
std::unique_ptr<Communicator> connect_mpi(const ConnectOptions& options);

// The words that start so many ranks of a program on this machine, which follows them. `mpiexec` is
// the launcher of the MPI that this build has found.
std::vector<std::string> mpi_launch(std::string_view mpiexec, int32_t ranks);
// Each is set in ranks that were started by some launcher: mpirun, mpiexec or srun.
inline constexpr std::array<std::string_view, 4> kMpiLaunchVariables = {
    "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"};

}  // namespace conclave::inline v0::comm
