#include "comm/nccl/join_ranks.h"

#include "comm/deadline.h"
#include "comm/nccl/join_words.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_work.h"
#include "comm/nccl/peer_windows.h"
#include "comm/tcp/connect_tcp.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cuda_runtime_api.h>
#include <exception>
#include <span>
#include <utility>
#include <vector>

namespace conclave::inline v0::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kPhase = "connect";
// For the words of ranks that NCCL has not connected in time.
constexpr std::chrono::nanoseconds kAnswerTime = std::chrono::seconds(1);

// A rank tells this to the others before NCCL connects them.
struct Card {
  int32_t version = 0;
  int32_t ordinal = 0;
  // Those of rank 0 count. The second connects the ranks once more, for their windows.
  std::array<NcclUniqueId, 2> ids = {};
};

std::vector<Card> exchange_cards(const Card& mine, Communicator& host,
                                 std::chrono::nanoseconds deadline) {
  std::vector<Card> cards(static_cast<size_t>(host.size()));
  const CommHandle handle = host.begin_all_gather(std::as_bytes(std::span(&mine, 1)),
                                                  std::as_writable_bytes(std::span(cards)));
  host.wait(handle, deadline, kPhase);
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

// An error of this rank alone ends the waits of the others, and messages that it has begun.
void give_up(Communicator& host, const char* why) {
  try {
    host.check(kPhase);
    host.abort(why);
    host.check(kPhase);
  } catch (const CommError&) {
    return;  // the error that made it give up is the one to tell
  }
}

// The ranks that are too late for NCCL say so to each other, and the silent one is to blame.
std::unique_ptr<NcclGroup> meet_by_nccl(Communicator& host, const NcclLibrary& nccl,
                                        int32_t ordinal, Clock::time_point until,
                                        const NcclGroup::Make& make) {
  JoinWords words(host);
  try {
    std::unique_ptr<NcclGroup> group;
    try {
      group = std::make_unique<NcclGroup>(nccl, ordinal, make, time_until(until),
                                          [&] { words.look(); });
    } catch (const CommError& error) {
      if (error.peer() < 0) words.meet(JoinWord::kHasGivenUp, kAnswerTime);
      throw;
    }
    words.meet(JoinWord::kIsThrough, time_until(until));
    return group;
  } catch (const std::exception& error) {
    // Messages to `words` end before it does.
    give_up(host, error.what());
    throw;
  }
}

struct Connected {
  std::unique_ptr<NcclGroup> group;
  PeerWindows::Search windows;
};

Connected connect_group(Communicator& host, int32_t ordinal, Clock::time_point until,
                        const MakeGroup& make) {
  if (host.size() == 1) {
    return {.group = std::make_unique<NcclGroup>(ordinal),
            .windows = {.windows = nullptr, .reason = "one rank has no peers"}};
  }
  const NcclLibrary nccl = usable_nccl();
  Card mine{.version = nccl.version, .ordinal = ordinal};
  if (!make && host.rank() == 0) {
    for (NcclUniqueId& id : mine.ids) check_nccl(nccl, nccl.get_unique_id(&id), "ncclGetUniqueId");
  }
  const Card first = exchange_cards(mine, host, time_until(until)).front();
  const int32_t ranks = host.size();
  const auto make_by = [nccl, make, rank = host.rank(), ranks](const NcclUniqueId& id) {
    return [=](ncclComm** comm) {
      NcclConfig config;
      return make ? make(nccl, comm) : nccl.comm_init_rank_config(comm, ranks, id, rank, &config);
    };
  };
  Connected made;
  made.group = meet_by_nccl(host, nccl, ordinal, until,
                            [nccl, ranks, own = make_by(first.ids[0])](ncclComm** comm) {
                              const NcclResult result = own(comm);
                              return connect_pairs(nccl, result, *comm, ranks);
                            });
  const auto make_other = [&](std::chrono::nanoseconds time) {
    return std::make_unique<NcclGroup>(nccl, ordinal, make_by(first.ids[1]), time,
                                       [&] { host.check(kPhase); });
  };
  made.windows = PeerWindows::open({.library = nccl,
                                    .host = host,
                                    .ordinal = ordinal,
                                    .make = make_other,
                                    .timeout = time_until(until)});
  return made;
}

}  // namespace

std::unique_ptr<NcclCommunicator> join_ranks(std::unique_ptr<Communicator>& host,
                                             const NcclPlace& place, const MakeGroup& make) {
  NcclCommunicator::Parts parts{.group = nullptr,
                                .host = nullptr,
                                .peers = nullptr,
                                .windows = nullptr,
                                .no_windows = {},
                                .timeout = place.timeout};
  const auto until = time_after(place.deadline);
  try {
    parts.peers = connect_tcp({.rank = host->rank(),
                               .size = host->size(),
                               .bootstrap = host.get(),
                               .device = "cpu",
                               .timeout = place.deadline});
    Connected made = connect_group(*host, place.ordinal, until, make);
    parts.group = std::move(made.group);
    parts.windows = std::move(made.windows.windows);
    parts.no_windows = std::move(made.windows.reason);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    give_up(*host, error.what());
    throw;
  }
  parts.host = std::move(host);
  return std::make_unique<NcclCommunicator>(std::move(parts));
}

NcclLibrary usable_nccl() {
  NcclSearch found = find_nccl();
  if (found.support) return std::move(found.library);
  throw Error(ErrorCode::kUnsupported,
              {.what = "cannot connect by transport nccl", .found = found.support.reason()});
}

}  // namespace conclave::inline v0::comm
