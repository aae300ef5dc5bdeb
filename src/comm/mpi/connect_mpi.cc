#include "comm/mpi/connect_mpi.h"

#include "comm/message/message_communicator.h"
#include "comm/message/pause.h"
#include "comm/mpi/mpi_port.h"
#include "comm/tcp/connect_tcp.h"

#include "conclave/interop/mpi.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kPhase = "connect";
constexpr std::string_view kCpu = "cpu";
// A network that lets no connection through shows that by silence.
constexpr auto kLineTime = std::chrono::seconds(10);

// Waits for a request of every rank. One that is left behind makes MPI_Finalize wait for ever.
void complete(MpiRuntime& runtime, MessageLock& lock, MPI_Request& request, const char* call,
              Clock::time_point until) {
  Pause pause;
  while (true) {
    int flag = 0;
    check_mpi(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), call);
    if (flag != 0) return;
    if (Clock::now() >= until) {
      runtime.leave_open();
      throw CommError(ErrorCode::kCommTimeout, -1, kPhase, "a rank did not connect in time");
    }
    pause.without(lock);
  }
}

// A copy of its own, whose messages nobody else sees, with errors that return.
MPI_Comm duplicate(MpiRuntime& runtime, MessageLock& lock, MPI_Comm from, Clock::time_point until) {
  // MPI may still write the handle of a copy that did not come in time.
  const auto copy = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(from, copy.get(), &request), "MPI_Comm_idup");
  try {
    complete(runtime, lock, request, "MPI_Comm_idup", until);
  } catch (const CommError&) {
    runtime.keep(copy);
    throw;
  }
  check_mpi(MPI_Comm_set_errhandler(*copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return *copy;
}

// MPI has no split that returns before all ranks have called it: they meet first.
MPI_Comm split(MpiRuntime& runtime, MessageLock& lock, MPI_Comm all, int32_t group,
               Clock::time_point until) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(all, &request), "MPI_Ibarrier");
  complete(runtime, lock, request, "MPI_Ibarrier", until);
  int rank = 0;
  MPI_Comm part = MPI_COMM_NULL;
  check_mpi(MPI_Comm_rank(all, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_split(all, group, rank, &part), "MPI_Comm_split");
  check_mpi(MPI_Comm_set_errhandler(part, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Comm_free(&all);
  return part;
}

// Ranks that share no memory, such as those of several hosts, settle who is left over connections
// of their own. Where these cannot be made there is no shrink, and all else is as before.
void settle_over_lines(MessageCommunicator& communicator, std::chrono::nanoseconds timeout) {
  if (communicator.supports(CommFeature::kShrink)) return;
  std::shared_ptr<VerdictPlace> lines;
  std::string reason;
  try {
    lines = connect_lines({.rank = communicator.rank(),
                           .size = communicator.size(),
                           .bootstrap = &communicator,
                           .timeout = std::min<std::chrono::nanoseconds>(timeout, kLineTime)});
  } catch (const std::exception& failure) {
    communicator.check(kPhase);  // what failed may be the communicator itself
    reason = fmt::format("its ranks share no memory, and have no connections by TCP: {}",
                         failure.what());
  }
  const int32_t lacking = lines ? 0 : 1;
  int32_t most = 0;
  communicator.all_reduce(std::as_bytes(std::span(&lacking, 1)),
                          std::as_writable_bytes(std::span(&most, 1)), DType::kI32, ReduceOp::kMax,
                          kPhase);
  if (most != 0 && reason.empty()) {
    reason = "its ranks share no memory, and some have no connections by TCP";
  }
  communicator.settle_at(most == 0 ? std::move(lines) : nullptr, std::move(reason));
}

std::unique_ptr<MessageCommunicator> join(MPI_Comm base, int32_t group,
                                          std::chrono::nanoseconds timeout) {
  try {
    MpiRuntime& runtime = MpiRuntime::start();
    std::unique_ptr<MessageCommunicator> communicator;
    {
      MessageLock lock(runtime.mutex());
      runtime.sweep();
      const Clock::time_point until = Clock::now() + timeout;
      // MPI_COMM_WORLD has no value before MPI is initialised.
      MPI_Comm from = base == MPI_COMM_NULL ? MPI_COMM_WORLD : base;
      MPI_Comm mine = duplicate(runtime, lock, from, until);
      if (group >= 0) mine = split(runtime, lock, mine, group, until);
      communicator =
          std::make_unique<MessageCommunicator>(std::make_unique<MpiPort>(runtime, mine), timeout);
    }
    communicator->meet();
    settle_over_lines(*communicator, timeout);
    return communicator;
  } catch (const PortFailure& failure) {
    throw CommError(ErrorCode::kCommPeerLost, failure.peer(), kPhase, failure.what());
  }
}

}  // namespace

Support mpi_supports(const ConnectOptions& options) {
  if (!options.device.empty() && options.device != kCpu) {
    return Support::no("it carries host memory, not that of " + options.device);
  }
  return mpi_is_open();
}

std::string mpi_library() { return mpi_description(); }

std::unique_ptr<Communicator> connect_mpi(const ConnectOptions& options) {
  auto communicator = join(MPI_COMM_NULL, options.group, options.timeout);
  if (options.size == 0 ||
      (communicator->rank() == options.rank && communicator->size() == options.size)) {
    return communicator;
  }
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "MPI's launcher has given this process another rank",
               .tensor = "rank",
               .expected = fmt::format("{} of {}", communicator->rank(), communicator->size()),
               .found = fmt::format("{} of {}", options.rank, options.size)});
}

std::vector<std::string> mpi_launch(std::string_view mpiexec, int32_t ranks) {
  std::vector<std::string> words = {std::string(mpiexec)};
#ifdef OPEN_MPI
  // Without recovery mpirun ends all ranks when one dies, before they can say which. Ranks have
  // threads of their own, which a binding to one core would put there all together.
  words.insert(words.end(), {"--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
                             "--enable-recovery"});
#if OMPI_MAJOR_VERSION < 5
  // All ranks are here: otherwise mpirun would want ssh in PATH before it starts any.
  words.insert(words.end(), {"--mca", "plm", "isolated"});
#endif
#elif defined(MPICH)
  words.emplace_back("-disable-auto-cleanup");
#endif
  words.insert(words.end(), {"-n", std::to_string(ranks)});
  return words;
}

}  // namespace conclave::inline v0::comm

namespace conclave::inline v0 {

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm communicator,
                                                    std::chrono::nanoseconds timeout) {
  if (communicator == MPI_COMM_NULL) {
    throw Error(ErrorCode::kNullPointer,
                {.what = "MPI_COMM_NULL has no ranks", .tensor = "communicator"});
  }
  return comm::join(communicator, -1, timeout);
}

}  // namespace conclave::inline v0
