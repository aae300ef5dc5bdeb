#include "comm/nccl/connect_nccl.h"

#include "comm/nccl/join_ranks.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_library.h"
#include "comm/tcp/connect_tcp.h"
#include "core/device.h"
#include "cuda/check.h"
#include "cuda/device_info.h"

#include "conclave/interop/nccl.h"

#include <fmt/format.h>

#include <chrono>
#include <cuda_runtime_api.h>
#include <memory>
#include <utility>
#include <vector>

namespace conclave::inline v0::comm {
namespace {

int32_t ordinal_of(const ConnectOptions& options) {
  if (!options.device.empty()) return parse_device(options.device).ordinal;
  int ordinal = 0;
  cuda::check(cudaGetDevice(&ordinal), "cudaGetDevice");
  return ordinal;
}

ConnectOptions on_host(ConnectOptions options) {
  options.device = "cpu";
  return options;
}

// Each rank reaches every other before anyone has the communicator.
std::unique_ptr<Communicator> connected(std::unique_ptr<Communicator> host, int32_t ordinal,
                                        std::chrono::nanoseconds timeout,
                                        const MakeGroup& make = {}) {
  auto communicator =
      join_ranks(host, {.ordinal = ordinal, .timeout = timeout, .deadline = timeout}, make);
  communicator->meet();
  return communicator;
}

}  // namespace

Support nccl_supports(const ConnectOptions& options) {
  if (!options.device.empty() && parse_device(options.device).kind != DeviceKind::kCuda) {
    return Support::no("it carries memory of a GPU, not that of " + options.device);
  }
  if (options.group >= 0) {
    return Support::no("no launcher gives its ranks, so that there are none to split");
  }
  if (options.size > 1 && !options.exchange && options.bootstrap == nullptr) {
    return Support::no("its ranks meet over `bootstrap` or `exchange`, and neither is given");
  }
  if (options.size > kMaxClaims + 1) {
    return Support::no(
        fmt::format("a group has at most {} ranks, not {}", kMaxClaims + 1, options.size));
  }
  const NcclSearch nccl = find_nccl();
  if (!nccl.support) return nccl.support;
  const cuda::DeviceCount devices = cuda::count_devices();
  if (devices.count == 0) return Support::no(devices.reason);
  if (options.device.empty()) return Support::yes();
  if (parse_device(options.device).ordinal < devices.count) return Support::yes();
  return Support::no(
      fmt::format("{} is none of the {} devices of this machine", options.device, devices.count));
}

std::unique_ptr<Communicator> connect_nccl(const ConnectOptions& options) {
  const int32_t ordinal = ordinal_of(options);
  const cuda::DeviceGuard guard(ordinal);
  return connected(connect_tcp(on_host(options)), ordinal, options.timeout);
}

std::string nccl_library_text() {
  const NcclLibrary nccl = find_nccl().library;
  const Support windows = has_windows(nccl);
  const std::string steps =
      windows ? "one launch an operation where ranks reach each other's memory" : windows.reason();
  return fmt::format("NCCL {} ({})", nccl_version_text(nccl.version), steps);
}

std::vector<std::string> nccl_launch(int32_t) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "no launcher starts ranks of nccl",
               .hint = "start the processes by another transport, and connect over that"});
}

}  // namespace conclave::inline v0::comm

namespace conclave::inline v0 {

std::unique_ptr<Communicator> make_nccl_communicator(ncclComm* communicator,
                                                     Communicator& bootstrap,
                                                     std::chrono::nanoseconds timeout) {
  if (communicator == nullptr) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "no communicator of NCCL is given", .tensor = "communicator"});
  }
  const comm::NcclLibrary nccl = comm::usable_nccl();
  int ranks = 0;
  int rank = 0;
  int ordinal = 0;
  comm::check_nccl(nccl, nccl.comm_count(communicator, &ranks), "ncclCommCount");
  comm::check_nccl(nccl, nccl.comm_user_rank(communicator, &rank), "ncclCommUserRank");
  comm::check_nccl(nccl, nccl.comm_cu_device(communicator, &ordinal), "ncclCommCuDevice");
  if (bootstrap.size() != ranks || bootstrap.rank() != rank) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "the bootstrap communicator has other ranks than that of NCCL",
                 .tensor = "bootstrap",
                 .expected = fmt::format("{} of {}", rank, ranks),
                 .found = fmt::format("{} of {}", bootstrap.rank(), bootstrap.size())});
  }
  const cuda::DeviceGuard guard(ordinal);
  auto host =
      comm::connect_tcp({.rank = rank, .size = ranks, .bootstrap = &bootstrap, .timeout = timeout});
  return comm::connected(std::move(host), ordinal, timeout,
                         [communicator, rank](const comm::NcclLibrary& library, ncclComm** made) {
                           comm::NcclConfig config;
                           return library.comm_split(communicator, 0, rank, made, &config);
                         });
}

}  // namespace conclave::inline v0
