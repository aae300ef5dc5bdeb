#include "comm/nccl/connect_nccl.h"

#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_library.h"
#include "comm/tcp/connect_tcp.h"
#include "core/device.h"
#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

#include "conclave/interop/nccl.h"

#include <fmt/format.h>

#include <algorithm>
#include <cuda_runtime_api.h>
#include <span>
#include <utility>
#include <vector>

namespace conclave::inline v0::comm {
namespace {

constexpr const char* kPhase = "connect";

// A rank tells this to the others before NCCL connects them.
struct Card {
  int32_t version = 0;
  int32_t ordinal = 0;
  NcclUniqueId id;  // that of rank 0 counts
};

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

std::vector<Card> exchange_cards(const Card& mine, Communicator& host,
                                 std::chrono::nanoseconds timeout) {
  std::vector<Card> cards(static_cast<size_t>(host.size()));
  const CommHandle handle = host.begin_all_gather(std::as_bytes(std::span(&mine, 1)),
                                                  std::as_writable_bytes(std::span(cards)));
  host.wait(handle, timeout, kPhase);
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    if (cards[rank].version == mine.version) continue;
    throw CommError(
        ErrorCode::kCommMismatch, static_cast<int32_t>(rank), kPhase,
        fmt::format("rank {} has NCCL {} where this one has {}", rank,
                    nccl_version_text(cards[rank].version), nccl_version_text(mine.version)));
  }
  return cards;
}

// NCCL connects a pair at its first message, and waits for it: never in a later operation.
NcclResult reach_everyone(const NcclLibrary& nccl, ncclComm* comm, int32_t ranks) {
  constexpr size_t kBytes = 16;
  const cuda::OwnedStream stream = cuda::make_stream();
  const cuda::DeviceBuffer memory(kBytes * 2 * static_cast<size_t>(ranks));
  NcclResult result = nccl.group_start();
  for (int32_t peer = 0; result == kNcclSuccess && peer < ranks; ++peer) {
    std::byte* const at = memory.data() + kBytes * 2 * static_cast<size_t>(peer);
    result = nccl.send(at, kBytes, kNcclByte, peer, comm, stream.get());
    if (result != kNcclSuccess) break;
    result = nccl.recv(at + kBytes, kBytes, kNcclByte, peer, comm, stream.get());
  }
  const NcclResult ended = nccl.group_end();
  if (result == kNcclSuccess) result = ended;
  if (result == kNcclSuccess && cudaStreamSynchronize(stream.get()) != cudaSuccess) result = 1;
  return result;
}

// Runs on a thread of its own, where an exception would end the process.
NcclResult connect_pairs(const NcclLibrary& nccl, NcclResult made, ncclComm* comm, int32_t ranks) {
  if (made != kNcclSuccess) return made;
  NcclResult reached = 1;  // as NCCL reports an error of CUDA
  try {
    reached = reach_everyone(nccl, comm, ranks);
  } catch (const std::exception&) {
    reached = 1;
  }
  if (reached == kNcclSuccess) return reached;
  // Nobody is given it, and threads of its own would run on.
  NcclWork::go_on();
  static_cast<void>(nccl.comm_abort(comm));
  return reached;
}

// Host communicators of the same ranks: the first for memory of hosts, the second for the watch.
struct Hosts {
  std::unique_ptr<Communicator> host;
  std::unique_ptr<Communicator> peers;
};
Hosts connect_hosts(const ConnectOptions& options) {
  Hosts hosts{.host = connect_tcp(on_host(options)), .peers = nullptr};
  hosts.peers = connect_tcp(on_host(options));
  return hosts;
}

std::unique_ptr<Communicator> join(Hosts hosts, std::unique_ptr<NcclGroup> group,
                                   std::chrono::nanoseconds timeout) {
  auto communicator =
      std::make_unique<NcclCommunicator>(NcclCommunicator::Parts{.group = std::move(group),
                                                                 .host = std::move(hosts.host),
                                                                 .peers = std::move(hosts.peers),
                                                                 .timeout = timeout});
  communicator->meet();
  return communicator;
}

NcclLibrary usable_nccl() {
  NcclSearch found = find_nccl();
  if (found.support) return std::move(found.library);
  throw Error(ErrorCode::kUnsupported,
              {.what = "cannot connect by transport nccl", .found = found.support.reason()});
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
  const int32_t ranks = std::max(options.size, 1);
  const int32_t rank = std::max(options.rank, 0);
  const int32_t ordinal = ordinal_of(options);
  const cuda::DeviceGuard guard(ordinal);
  Hosts hosts = connect_hosts(options);
  if (ranks == 1) {
    return join(std::move(hosts), std::make_unique<NcclGroup>(ordinal), options.timeout);
  }
  const NcclLibrary nccl = usable_nccl();
  Card mine{.version = nccl.version, .ordinal = ordinal, .id = {}};
  if (rank == 0) check_nccl(nccl, nccl.get_unique_id(&mine.id), "ncclGetUniqueId");
  const Card first = exchange_cards(mine, *hosts.host, options.timeout).front();
  auto group = std::make_unique<NcclGroup>(
      nccl, ordinal,
      [nccl, rank, ranks, id = first.id](ncclComm** comm) {
        NcclConfig config;
        const NcclResult made = nccl.comm_init_rank_config(comm, ranks, id, rank, &config);
        return connect_pairs(nccl, made, *comm, ranks);
      },
      options.timeout);
  return join(std::move(hosts), std::move(group), options.timeout);
}

std::string nccl_library_text() {
  const NcclSearch nccl = find_nccl();
  return "NCCL " + nccl_version_text(nccl.library.version);
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
  comm::Hosts hosts = comm::connect_hosts(
      {.rank = rank, .size = ranks, .bootstrap = &bootstrap, .timeout = timeout});
  comm::exchange_cards({.version = nccl.version, .ordinal = ordinal, .id = {}}, *hosts.host,
                       timeout);
  auto group = std::make_unique<comm::NcclGroup>(
      nccl, ordinal,
      [nccl, communicator, rank, ranks](ncclComm** comm) {
        comm::NcclConfig config;
        const comm::NcclResult made = nccl.comm_split(communicator, 0, rank, comm, &config);
        return comm::connect_pairs(nccl, made, *comm, ranks);
      },
      timeout);
  return comm::join(std::move(hosts), std::move(group), timeout);
}

}  // namespace conclave::inline v0
