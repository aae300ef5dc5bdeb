#include "core/catalog.h"

#include "comm/communicator.h"
#include "comm/local/connect_local.h"
#include "comm/tcp/connect_tcp.h"
#include "core/build_config.h"

#include <array>
#if CONCLAVE_BUILD_MPI
#include "comm/mpi/connect_mpi.h"
#endif
#if CONCLAVE_BUILD_CUDA
#include "comm/nccl/connect_nccl.h"
#endif

namespace conclave::inline v0::comm {
namespace {

#if CONCLAVE_BUILD_MPI
constexpr CommunicatorRow kMpi{
    .name = "mpi",
    .ranks = "processes",
    .supports = mpi_supports,
    .connect = connect_mpi,
    .make_group = nullptr,
    .library = mpi_library,
    .launch = [](int32_t ranks) { return mpi_launch(CONCLAVE_BUILD_MPIEXEC, ranks); },
    .launch_variables = kMpiLaunchVariables};
#else
constexpr CommunicatorRow kMpi{
    .name = "mpi",
    .ranks = "processes",
    .supports = [](const ConnectOptions&) { return Support::no(CONCLAVE_BUILD_NO_MPI); },
    .connect = nullptr,
    .make_group = nullptr};
#endif

constexpr CommunicatorRow kTcp{
    .name = "tcp",
    .ranks = "processes, of any hosts, that tell each other where they are",
    .supports = tcp_supports,
    .connect = connect_tcp,
    .make_group = nullptr,
    .launch = tcp_launch,
    .meets_by_exchange = true};

constexpr std::string_view kNcclDeviceKind = "cuda";
#if CONCLAVE_BUILD_CUDA
constexpr CommunicatorRow kNccl{.name = "nccl",
                                .ranks = "processes or threads with a GPU each",
                                .supports = nccl_supports,
                                .connect = connect_nccl,
                                .make_group = nullptr,
                                .library = nccl_library_text,
                                .launch = nccl_launch,
                                .meets_by_exchange = true,
                                .device_kind = kNcclDeviceKind};
#else
constexpr CommunicatorRow kNccl{
    .name = "nccl",
    .ranks = "processes or threads with a GPU each",
    .supports = [](const ConnectOptions&) { return Support::no("this build has no CUDA support"); },
    .connect = nullptr,
    .make_group = nullptr,
    .meets_by_exchange = true,
    .device_kind = kNcclDeviceKind};
#endif

constexpr std::array kCommunicators = {
    CommunicatorRow{"local", "threads of one process", local_supports, connect_local,
                    make_local_group},
    kMpi,
    kTcp,
    kNccl,
};

}  // namespace

Catalog<CommunicatorRow> communicator_catalog() { return Catalog<CommunicatorRow>(kCommunicators); }

}  // namespace conclave::inline v0::comm
