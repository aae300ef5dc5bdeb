#include "capi/own_communicator.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/structs.h"
#include "capi/values.h"
#include "core/max_ranks.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>
#include <vector>

namespace conclave::inline v0::capi {
namespace {

static_assert(CONCLAVE_COMM_KIND_ALL_TO_ALL_V == static_cast<int32_t>(CommKind::kAllToAllV) &&
              CONCLAVE_COMM_KIND_ALL_GATHER == static_cast<int32_t>(CommKind::kAllGather) &&
              CONCLAVE_COMM_KIND_ALL_REDUCE == static_cast<int32_t>(CommKind::kAllReduce) &&
              CONCLAVE_COMM_KIND_REDUCE_SCATTER == static_cast<int32_t>(CommKind::kReduceScatter) &&
              CONCLAVE_COMM_KIND_BARRIER == static_cast<int32_t>(CommKind::kBarrier) &&
              CONCLAVE_COMM_KIND_SEND == static_cast<int32_t>(CommKind::kSend) &&
              CONCLAVE_COMM_KIND_RECV == static_cast<int32_t>(CommKind::kRecv) &&
              CONCLAVE_REDUCE_OP_SUM == static_cast<int32_t>(ReduceOp::kSum) &&
              CONCLAVE_REDUCE_OP_MAX == static_cast<int32_t>(ReduceOp::kMax));

// The codes of ranks are the numbers from 700 on.
bool is_of_ranks(ErrorCode code) {
  return static_cast<int32_t>(code) >= static_cast<int32_t>(ErrorCode::kCommPeerLost);
}

// Functions come in pairs where one is of no use without the other.
void check_pair(bool first, bool second, const std::string& missing) {
  if (first == second) return;
  throw Error(ErrorCode::kNullPointer,
              {.what = "a function is needed where its other half is given", .tensor = missing});
}

bool is_reduction(CommKind kind) {
  return kind == CommKind::kAllReduce || kind == CommKind::kReduceScatter;
}

conclave_comm_operation operation_in_c(const CommOperation& from, uint64_t number) {
  conclave_comm_operation to{};
  to.struct_size = sizeof(to);
  to.number = number;
  to.kind = static_cast<int32_t>(from.kind);
  to.peer = from.peer;
  to.send = from.send.data();
  to.send_bytes = from.send.span.size();
  to.recv = from.recv.data();
  to.recv_bytes = from.recv.span.size();
  to.send_memory = static_cast<int32_t>(from.send.memory);
  to.recv_memory = static_cast<int32_t>(from.recv.memory);
  to.stream = from.stream.handle;
  to.in_background = from.in_background ? 1 : 0;
  if (is_reduction(from.kind)) {
    to.dtype = to_c(from.dtype);
    to.reduce = static_cast<int32_t>(from.reduce);
  }
  if (from.kind != CommKind::kAllToAllV) return to;
  const AllToAllV& exchange = from.exchange;
  to.send = exchange.send;
  to.recv = exchange.recv;
  to.send_counts = exchange.send_bytes.data();
  to.send_offsets = exchange.send_offsets.data();
  to.recv_counts = exchange.recv_bytes.data();
  to.recv_offsets = exchange.recv_offsets.data();
  to.send_memory = to.recv_memory = static_cast<int32_t>(exchange.memory);
  return to;
}

class CPeerWindow final : public PeerWindow {
 public:
  CPeerWindow(std::shared_ptr<const CommunicatorFunctions> functions, size_t bytes, void* window,
              std::vector<std::byte*> blocks)
      : functions_(std::move(functions)),
        bytes_(bytes),
        window_(window),
        blocks_(std::move(blocks)) {}
  CPeerWindow(const CPeerWindow&) = delete;
  CPeerWindow& operator=(const CPeerWindow&) = delete;
  ~CPeerWindow() override {
    const conclave_own_communicator& own = functions_->given();
    own.close_window(own.user, window_);
  }
  size_t bytes() const noexcept override { return bytes_; }
  std::byte* block(int32_t rank) const noexcept override {
    return blocks_[static_cast<size_t>(rank)];
  }

 private:
  std::shared_ptr<const CommunicatorFunctions> functions_;
  size_t bytes_;
  void* window_;
  std::vector<std::byte*> blocks_;
};

// The first ranks of `old_ranks`, as the new group has them. Throws Error(kState).
std::vector<int32_t> checked_ranks(const std::vector<int32_t>& old_ranks, int32_t me,
                                   const conclave_own_communicator& left) {
  const auto count = static_cast<size_t>(left.size);
  const auto refuse = [](const char* what, const std::string& found) {
    throw Error(ErrorCode::kState,
                {.what = what, .tensor = "own.shrink: old_ranks", .found = found});
  };
  if (count > old_ranks.size()) {
    refuse("there are more ranks left than there were", std::to_string(count));
  }
  std::vector<int32_t> ranks(old_ranks.begin(), old_ranks.begin() + left.size);
  for (size_t i = 0; i < count; ++i) {
    const bool ascends = i == 0 ? ranks[i] >= 0 : ranks[i] > ranks[i - 1];
    if (ascends && ranks[i] < static_cast<int32_t>(old_ranks.size())) continue;
    refuse("ranks that are left are not ascending numbers of ranks that were",
           std::to_string(ranks[i]) + " at " + std::to_string(i));
  }
  if (ranks[static_cast<size_t>(left.rank)] != me) {
    refuse("the table is that of another rank",
           std::to_string(ranks[static_cast<size_t>(left.rank)]) + " for this one, " +
               std::to_string(me));
  }
  return ranks;
}

}  // namespace

CommunicatorFunctions::CommunicatorFunctions(const conclave_own_communicator& own,
                                             const std::string& prefix)
    : given_(own) {
  const auto field = [&](const char* member) { return prefix + "." + member; };
  name_ = &required(own.name, field("name").c_str());
  given_.name = name_.c_str();
  required(own.start, field("start").c_str());
  required(own.wait, field("wait").c_str());
  required(own.test, field("test").c_str());
  required(own.abort, field("abort").c_str());
  check_pair(own.open_window != nullptr, own.close_window != nullptr,
             field(own.open_window == nullptr ? "open_window" : "close_window"));
  if (own.wait_on != nullptr) required(own.check, field("check").c_str());
  check_choice(field("size").c_str(), own.size, kMaxRanks);
  if (own.size == 0) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a communicator has ranks",
                                              .tensor = field("size"),
                                              .found = "0",
                                              .limit = "at least 1"});
  }
  check_choice(field("rank").c_str(), own.rank, own.size - 1);
  timeout_of(field("timeout_ms").c_str(), own.timeout_ms);
  check_flags(field("flags").c_str(), own.flags,
              CONCLAVE_OWN_COMMUNICATOR_DEVICE_MEMORY | CONCLAVE_OWN_COMMUNICATOR_OVERLAP);
  check_flags(field("reserved").c_str(), own.reserved, 0);
}

CommunicatorFunctions::~CommunicatorFunctions() {
  if (is_kept_ && given_.release != nullptr) given_.release(given_.user);
}

CCommunicator::CCommunicator(std::shared_ptr<const CommunicatorFunctions> functions)
    : functions_(std::move(functions)), timeout_(timeout_of("timeout_ms", own().timeout_ms)) {}

Support CCommunicator::supports(CommFeature feature) const {
  const auto has = [&](unsigned flag) { return (own().flags & flag) != 0; };
  bool is_there = false;
  switch (feature) {
    case CommFeature::kHostMemory:
      is_there = true;
      break;
    case CommFeature::kDeviceMemory:
      is_there = has(CONCLAVE_OWN_COMMUNICATOR_DEVICE_MEMORY);
      break;
    case CommFeature::kStreamOrder:
      is_there = own().wait_on != nullptr;
      break;
    case CommFeature::kOverlap:
      is_there = has(CONCLAVE_OWN_COMMUNICATOR_OVERLAP);
      break;
    case CommFeature::kPeerMemory:
      is_there = own().open_window != nullptr;
      break;
    case CommFeature::kShrink:
      is_there = own().shrink != nullptr;
      break;
  }
  return is_there ? Support::yes() : Communicator::supports(feature);
}

Support CCommunicator::supports_reduction(DType dtype, ReduceOp op) const {
  const Support every = Communicator::supports_reduction(dtype, op);
  if (every || own().supports_reduction == nullptr) return every;
  const bool carries =
      own().supports_reduction(own().user, to_c(dtype), static_cast<int32_t>(op)) == 1;
  return carries ? Support::yes() : every;
}

void CCommunicator::throw_failure(const Failure& failure, std::string_view phase) {
  if (is_of_ranks(failure.code)) {
    throw CommError(failure.code, failure.peer, std::string(phase), failure.what);
  }
  throw Error(failure.code, {.what = failure.what, .tensor = std::string(phase)});
}

void CCommunicator::check_usable(std::string_view phase) const {
  if (failure_) throw_failure(*failure_, phase);
}

// The failure is kept before its text, for which there may be no memory.
template <class Call>
void CCommunicator::try_call(const char* function, Call&& call) {
  conclave_comm_failure said{
      .struct_size = sizeof(conclave_comm_failure), .peer = -1, .reserved = 0, .reason = nullptr};
  const auto where = [&] { return functions_->name() + ": " + function; };
  try {
    const conclave_status status = std::forward<Call>(call)(&said);
    if (status == CONCLAVE_OK) return;
    const bool names_rank = said.peer >= 0 && said.peer < size();
    failure_ = Failure{.code = find_code(status).value_or(ErrorCode::kState),
                       .peer = names_rank ? said.peer : -1,
                       .what = {}};
    failure_->what = where() + " failed with status " + std::to_string(status) +
                     (said.reason == nullptr ? "" : ": " + std::string(said.reason));
  } catch (const std::bad_alloc&) {
    if (failure_) throw;
    failure_ = Failure{.code = ErrorCode::kOutOfMemory, .peer = -1, .what = {}};
    failure_->what = where() + " found no memory";
  } catch (const std::exception& error) {
    if (failure_) throw;
    failure_ = Failure{.code = ErrorCode::kInternal, .peer = -1, .what = {}};
    failure_->what = where() + " ended with an exception: " + error.what();
  } catch (...) {
    failure_ = Failure{.code = ErrorCode::kInternal, .peer = -1, .what = {}};
    failure_->what = where() + " ended with an exception";
  }
}

template <class Call>
void CCommunicator::call(const char* function, std::string_view phase, Call&& call) {
  check_usable(phase);
  try_call(function, std::forward<Call>(call));
  check_usable(phase);
}

// A wait must not need memory: what is begun would go on without it. Cut between two letters.
const char* CCommunicator::phase_text(std::string_view phase) {
  const auto continues = [&](size_t at) {
    return (static_cast<unsigned char>(phase[at]) & 0xC0U) == 0x80U;
  };
  size_t length = std::min(phase.size(), phase_.size() - 1);
  while (length > 0 && length < phase.size() && continues(length)) --length;
  std::copy_n(phase.begin(), length, phase_.begin());
  phase_[length] = '\0';
  return phase_.data();
}

CommHandle CCommunicator::start(const CommOperation& operation) {
  const CommHandle handle{++last_number_};
  if (failure_) return handle;
  const conclave_comm_operation given = operation_in_c(operation, handle.sequence);
  // An error waits for the phase that the operation's wait has.
  try_call("start", [&](auto* failure) { return own().start(own().user, &given, failure); });
  return handle;
}

void CCommunicator::wait(CommHandle handle, std::chrono::nanoseconds deadline,
                         std::string_view phase) {
  call("wait", phase, [&](auto* failure) {
    return own().wait(own().user, handle.sequence, deadline.count(), phase_text(phase), failure);
  });
}

bool CCommunicator::test(CommHandle handle, std::string_view phase) {
  int32_t complete = 0;
  call("test", phase, [&](auto* failure) {
    return own().test(own().user, handle.sequence, &complete, phase_text(phase), failure);
  });
  return complete != 0;
}

void CCommunicator::wait_on(Stream stream, CommHandle handle, std::chrono::nanoseconds deadline,
                            std::string_view phase) {
  if (own().wait_on == nullptr) return Communicator::wait_on(stream, handle, deadline, phase);
  call("wait_on", phase, [&](auto* failure) {
    return own().wait_on(own().user, stream.handle, handle.sequence, deadline.count(),
                         phase_text(phase), failure);
  });
}

void CCommunicator::check(std::string_view phase) {
  check_usable(phase);
  if (own().check == nullptr) return;
  call("check", phase,
       [&](auto* failure) { return own().check(own().user, phase_text(phase), failure); });
}

std::unique_ptr<PeerWindow> CCommunicator::open_window(size_t bytes, MemoryKind memory,
                                                       std::chrono::nanoseconds deadline,
                                                       std::string_view phase) {
  if (own().open_window == nullptr) {
    return Communicator::open_window(bytes, memory, deadline, phase);
  }
  conclave_peer_window made{
      .struct_size = sizeof(conclave_peer_window), .window = nullptr, .blocks = nullptr};
  std::vector<std::byte*> blocks(static_cast<size_t>(size()));
  call("open_window", phase, [&](auto* failure) {
    return own().open_window(own().user, bytes, static_cast<int32_t>(memory), deadline.count(),
                             phase_text(phase), &made, failure);
  });
  if (made.blocks != nullptr) {
    std::transform(made.blocks, made.blocks + size(), blocks.begin(),
                   [](void* block) { return static_cast<std::byte*>(block); });
  }
  auto window = std::make_unique<CPeerWindow>(functions_, bytes, made.window, std::move(blocks));
  for (int32_t rank = 0; bytes > 0 && rank < size(); ++rank) {
    if (window->block(rank) != nullptr) continue;
    throw Error(ErrorCode::kState, {.what = "a window has no block of rank " + std::to_string(rank),
                                    .tensor = "own.open_window: blocks"});
  }
  return window;
}

void CCommunicator::abort(std::string_view reason) noexcept {
  // Nobody can be told of a failure here; peers wait until their deadlines then.
  try {
    own().abort(own().user, std::string(reason).c_str());
  } catch (...) {
    static_cast<void>(std::current_exception());
  }
}

Survivors CCommunicator::shrink(std::chrono::nanoseconds deadline, std::string_view phase) {
  if (own().shrink == nullptr) return Communicator::shrink(deadline, phase);
  if (std::exchange(has_shrunk_, true)) {
    throw Error(ErrorCode::kState,
                {.what = "this rank has gone on from this communicator before",
                 .hint = "call conclave_survivors with the communicator that it returned"});
  }
  const std::string why = "rank " + std::to_string(rank()) + " calls for the survivors";
  // No abort: it would also end what peers have yet to read of operations that this rank has
  // completed. The first failure stays that of the group; one of the roll call is the caller's.
  const Failure before =
      failure_.value_or(Failure{.code = ErrorCode::kCommAborted, .peer = rank(), .what = why});
  failure_.reset();
  const conclave_own_communicator* table = nullptr;
  std::vector<int32_t> old_ranks(static_cast<size_t>(size()), -1);
  try_call("shrink", [&](auto* failure) {
    return own().shrink(own().user, deadline.count(), phase_text(phase), &table, old_ranks.data(),
                        failure);
  });
  const std::optional<Failure> of_roll_call = std::exchange(failure_, before);
  if (of_roll_call) throw_failure(*of_roll_call, phase);

  auto left =
      std::make_shared<CommunicatorFunctions>(take(table, "own.shrink: left"), "own.shrink: left");
  std::vector<int32_t> ranks = checked_ranks(old_ranks, rank(), left->given());
  auto communicator = std::make_unique<CCommunicator>(left);
  left->keep();
  return {.communicator = std::move(communicator), .old_ranks = std::move(ranks)};
}

}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_communicator_from_own(const conclave_own_communicator* own,
                                               conclave_communicator** out) noexcept {
  return capi::guarded([&] {
    const conclave_own_communicator given = capi::take(own, "own");
    capi::required(out, "out");
    const auto functions = std::make_shared<capi::CommunicatorFunctions>(given, "own");
    capi::hand_out(out, std::make_shared<capi::CCommunicator>(functions));
    functions->keep();
  });
}
