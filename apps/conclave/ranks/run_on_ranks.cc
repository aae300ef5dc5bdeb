#include "ranks/run_on_ranks.h"

#include "output/report_error.h"
#include "output/terminal.h"
#include "ranks/connect_ranks.h"
#include "ranks/gpus.h"
#include "ranks/launch.h"
#include "ranks/launchers.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

using Work = std::function<ExitCode(RankTeam&)>;

// This became of one rank.
struct Outcome {
  ExitCode code = ExitCode::kOk;
  std::optional<Error> error;
  bool caused_by_others = false;
};

ExitCode worse(ExitCode a, ExitCode b) { return static_cast<int>(a) < static_cast<int>(b) ? b : a; }

void check_split(int32_t ranks, int32_t tensor_ranks) {
  if (ranks % tensor_ranks == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "the ranks are not whole tensor-parallel groups",
               .tensor = "--tp",
               .expected = fmt::format("a divisor of {} ranks", ranks),
               .found = std::to_string(tensor_ranks)});
}

// Peers of a communicator that has failed have been told which rank is to blame.
void end_exchanges(Communicator& communicator, const char* why) {
  try {
    communicator.check("give up");
    communicator.abort(why);
  } catch (const Error&) {
    return;
  }
}

using Groups = std::vector<Communicator*>;

// Runs the work and, where it fails, ends the exchanges of the other ranks. The work leaves the
// groups that it has.
Outcome run_rank(const std::function<ExitCode(Groups&)>& work) {
  Outcome outcome;
  Groups groups;
  const auto fail = [&](const Error& error, bool caused_by_others) {
    outcome = {
        .code = exit_code(error.code()), .error = error, .caused_by_others = caused_by_others};
    for (Communicator* group : groups) end_exchanges(*group, error.what());
  };
  try {
    outcome.code = work(groups);
  } catch (const CommError& error) {
    fail(error, true);
  } catch (const Error& error) {
    fail(error, false);
  } catch (const std::bad_alloc&) {
    fail(Error(ErrorCode::kOutOfMemory, "out of memory"), false);
  } catch (const std::exception& error) {
    fail(Error(ErrorCode::kInternal, error.what()), false);
  }
  return outcome;
}

// Under a launcher of the user's own no one else would compare the codes.
ExitCode worst_code(RankTeam& team, const Work& work) {
  return static_cast<ExitCode>(
      team.largest(static_cast<int64_t>(work(team)), "compare the exit codes"));
}

using Group = std::vector<std::unique_ptr<Communicator>>;

std::vector<Group> make_groups(int32_t count, int32_t size, std::chrono::nanoseconds timeout) {
  std::vector<Group> groups;
  for (int32_t i = 0; i < count; ++i) {
    groups.push_back(make_local_group({.num_ranks = size, .timeout = timeout}));
  }
  return groups;
}

// The error that the others follow from, if a rank has one.
const Outcome* cause_of(const std::vector<Outcome>& outcomes) {
  const auto own = std::find_if(outcomes.begin(), outcomes.end(),
                                [](const Outcome& o) { return o.error && !o.caused_by_others; });
  if (own != outcomes.end()) return &*own;
  const auto any = std::find_if(outcomes.begin(), outcomes.end(),
                                [](const Outcome& o) { return o.error.has_value(); });
  return any == outcomes.end() ? nullptr : &*any;
}

ExitCode run_on_threads(const RankOptions& options, int32_t ranks, const Work& work) {
  const auto tp_size = static_cast<size_t>(options.tensor_ranks);
  const int32_t ep_size = ranks / options.tensor_ranks;
  const Group all = make_local_group({.num_ranks = ranks, .timeout = options.timeout()});
  const auto experts = make_groups(options.tensor_ranks, ep_size, options.timeout());
  const auto slices = make_groups(ep_size, options.tensor_ranks, options.timeout());
  std::vector<Outcome> outcomes(all.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    threads.emplace_back([&, rank] {
      Communicator* const mine[] = {all[rank].get(), experts[rank % tp_size][rank / tp_size].get(),
                                    slices[rank / tp_size][rank % tp_size].get()};
      outcomes[rank] = run_rank([&](Groups& groups) {
        groups.assign(std::begin(mine), std::end(mine));
        RankTeam team(*mine[0], *mine[1], *mine[2]);
        team.share_machine(ranks);
        return worst_code(team, work);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExitCode code = ExitCode::kOk;
  for (const Outcome& outcome : outcomes) code = worse(code, outcome.code);
  if (const Outcome* cause = cause_of(outcomes)) report_error(*cause->error);
  return code;
}

void check_size(const RankOptions& options, int32_t size) {
  if (!options.ranks || *options.ranks == size) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "the launcher started another number of ranks",
                                            .tensor = "--ranks",
                                            .expected = std::to_string(size),
                                            .found = std::to_string(*options.ranks)});
}

// How this process has become a rank: a launcher said so by the environment, or MPI's to `host`.
struct Seat {
  std::optional<LaunchedRank> launched;
  std::string host;

  int32_t ranks_here(const Communicator& all) const {
    if (launched) return launched->ranks_here;
    return was_launched_here() ? all.size() : 1;
  }
};

// Before the ranks meet, which they may never do.
void announce() {
  if (!was_launched_here()) return;
  if (const auto own = launched_rank()) announce_to_launcher(own->rank);
}

// This process is one rank.
ExitCode run_as_rank(const RankOptions& options, const std::string& transport, const Seat& seat,
                     const Work& work) {
  ConnectedRank rank;
  // One of those that cannot even meet says so.
  int32_t number = seat.launched ? seat.launched->rank : 0;
  const Outcome outcome = run_rank([&](Groups& groups) {
    if (seat.launched) check_size(options, seat.launched->size);
    announce();
    rank.all = connect_all(seat.launched, seat.host, options);
    groups.push_back(rank.all.get());
    number = rank.all->rank();
    check_size(options, rank.all->size());
    check_split(rank.all->size(), options.tensor_ranks);
    if (const auto process = find_process_transport(transport)) {
      connect_groups(*process, options, rank);
    } else {
      connect_groups(transport, options, rank);
    }
    groups.insert(groups.end(), {rank.experts.get(), rank.slices.get()});
    RankTeam team(*rank.all, *rank.experts, *rank.slices);
    team.share_machine(seat.ranks_here(*rank.all));
    team.use_device(rank.device);
    return worst_code(team, work);
  });
  if (outcome.error && number == 0) report_error(*outcome.error);
  report_to_launcher(number, outcome.code);
  return outcome.code;
}

// The transport whose launcher has started this process; empty if none has.
std::string launcher_transport() {
  for (const TransportInfo& info : transports()) {
    const auto is_set = [](const std::string& name) {
      return !environment_value(name.c_str()).empty();
    };
    if (info.usable &&
        std::any_of(info.launch_variables.begin(), info.launch_variables.end(), is_set)) {
      return info.name;
    }
  }
  return {};
}

// None if this process is no rank of a transport whose ranks need no launcher of their own.
std::optional<Seat> process_seat(const std::string& launched_by) {
  // Over MPI ranks of several machines meet, too.
  if (!launched_by.empty() && !is_rank_of_tool()) return Seat{.launched = {}, .host = launched_by};
  if (auto launched = launched_rank()) return Seat{.launched = std::move(launched), .host = {}};
  return std::nullopt;
}

ExitCode run_on_processes(const RankOptions& options, const ProcessTransport& transport,
                          const std::string& launched_by, const Work& work) {
  if (const auto seat = process_seat(launched_by)) {
    return run_as_rank(options, transport.name, *seat, work);
  }
  const auto ranks = static_cast<int32_t>(options.ranks.value_or(1));
  check_split(ranks, options.tensor_ranks);
  if (!transport.device_kind.empty()) check_gpus(transport, ranks);
  if (ranks > 1) return start_ranks(ranks, options.timeout());
  RankTeam alone;
  if (!transport.device_kind.empty()) alone.use_device(transport.device_kind + ":0");
  return work(alone);
}

}  // namespace

ExitCode run_on_ranks(const RankOptions& options, const Work& work) {
  const std::string launched_by = launcher_transport();
  std::string transport = options.transport.empty() ? launched_by : options.transport;
  if (const auto process = find_process_transport(transport)) {
    return run_on_processes(options, *process, launched_by, work);
  }
  if (!transport.empty() && transport == launched_by) {
    return run_as_rank(options, transport, {.launched = {}, .host = launched_by}, work);
  }
  if (transport.empty()) transport = transports().front().name;
  const auto ranks = static_cast<int32_t>(options.ranks.value_or(1));
  check_split(ranks, options.tensor_ranks);
  const std::vector<std::string> command = launch_command(transport, ranks);
  if (!command.empty()) return launch_ranks(command, ranks, options.timeout());
  if (ranks > 1) return run_on_threads(options, ranks, work);
  RankTeam alone;
  return work(alone);
}

}  // namespace conclave::tool
