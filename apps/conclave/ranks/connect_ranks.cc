#include "ranks/connect_ranks.h"

#include "ranks/gpus.h"
#include "ranks/meeting.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

constexpr std::string_view kPhase = "connect";

// The texts of all ranks.
std::vector<std::string> texts_of_all(Communicator& all, const std::string& mine) {
  const auto ranks = static_cast<size_t>(all.size());
  const auto length = static_cast<int64_t>(mine.size());
  std::vector<int64_t> lengths(ranks);
  all.all_gather(std::as_bytes(std::span(&length, 1)), std::as_writable_bytes(std::span(lengths)),
                 kPhase);
  const auto longest = static_cast<size_t>(std::ranges::max(lengths));
  std::string padded = mine;
  padded.resize(longest);
  std::string together(longest * ranks, '\0');
  all.all_gather(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(together)),
                 kPhase);
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < ranks; ++rank) {
    texts.push_back(together.substr(rank * longest, static_cast<size_t>(lengths[rank])));
  }
  return texts;
}

// The ranks first, first + step, ... of all.
struct Members {
  int32_t first = 0;
  int32_t step = 1;
  int32_t size = 1;
};

// Groups have equal sizes, so that all ranks exchange equally often, though each listens to its
// own group.
std::unique_ptr<Communicator> connect_members(const ProcessTransport& transport,
                                              const RankOptions& options, const Members& members,
                                              const ConnectedRank& rank) {
  Communicator& all = *rank.all;
  const auto exchange = [&](const std::string& mine) {
    const std::vector<std::string> texts = texts_of_all(all, mine);
    std::vector<std::string> of_members;
    for (int32_t i = 0; i < members.size; ++i) {
      of_members.push_back(texts[static_cast<size_t>(members.first + i * members.step)]);
    }
    return of_members;
  };
  return connect(transport.name, {.rank = (all.rank() - members.first) / members.step,
                                  .size = members.size,
                                  .exchange = exchange,
                                  .device = rank.device,
                                  .timeout = options.timeout()});
}

}  // namespace

std::optional<ProcessTransport> find_process_transport(std::string_view name) {
  for (TransportInfo& info : transports()) {
    if (info.name != name || !info.meets_by_exchange) continue;
    return ProcessTransport{.name = std::move(info.name),
                            .device_kind = std::move(info.device_kind)};
  }
  return std::nullopt;
}

std::unique_ptr<Communicator> connect_all(const std::optional<LaunchedRank>& launched,
                                          const std::string& host, const RankOptions& options) {
  if (!launched) return connect(host, {.timeout = options.timeout()});
  FileMeeting meeting(launched->meeting, launched->rank, launched->size, options.timeout());
  const auto exchange = [&](const std::string& mine) { return meeting.exchange(mine); };
  auto all = connect("tcp", {.rank = launched->rank,
                             .size = launched->size,
                             .exchange = exchange,
                             .timeout = options.timeout()});
  all->barrier(kPhase);  // by then everyone has read this rank's texts
  return all;
}

void connect_groups(const ProcessTransport& transport, const RankOptions& options,
                    ConnectedRank& rank) {
  if (!transport.device_kind.empty()) {
    rank.device = device_of_rank(*rank.all, transport.device_kind);
  }
  const int32_t me = rank.all->rank();
  const int32_t tp_size = options.tensor_ranks;
  const int32_t tp_rank = me % tp_size;
  rank.experts = connect_members(
      transport, options, {.first = tp_rank, .step = tp_size, .size = rank.all->size() / tp_size},
      rank);
  rank.slices = connect_members(transport, options, {.first = me - tp_rank, .size = tp_size}, rank);
}

void connect_groups(const std::string& transport, const RankOptions& options, ConnectedRank& rank) {
  const int32_t me = rank.all->rank();
  rank.experts =
      connect(transport, {.group = me % options.tensor_ranks, .timeout = options.timeout()});
  rank.slices =
      connect(transport, {.group = me / options.tensor_ranks, .timeout = options.timeout()});
}

}  // namespace conclave::tool
