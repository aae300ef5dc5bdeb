#include "support/rank_fault.h"

#include "support/layer_fixture.h"

#include "conclave/balance.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

namespace conclave::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array<std::pair<Fault, const char*>, 6> kFaults = {{
    {Fault::kDies, "dies"},
    {Fault::kStops, "stops"},
    {Fault::kThrows, "throws"},
    {Fault::kDisagrees, "disagrees"},
    {Fault::kNeverCalls, "never_calls"},
    {Fault::kIsSlow, "is_slow"},
}};
constexpr std::array<std::pair<FaultPhase, const char*>, 6> kPhases = {{
    {FaultPhase::kCreate, "create"},
    {FaultPhase::kAgree, "agree"},
    {FaultPhase::kDispatch, "dispatch"},
    {FaultPhase::kProducts, "products"},
    {FaultPhase::kCombine, "combine"},
    {FaultPhase::kSurvivors, "survivors"},
}};

// What a wait calls itself in each phase.
bool is_wait_of(FaultPhase phase, std::string_view wait) {
  switch (phase) {
    case FaultPhase::kCreate:
      return wait.starts_with("create");
    case FaultPhase::kAgree:
      return wait.starts_with("forward: agree");
    case FaultPhase::kDispatch:
      return wait.starts_with("dispatch");
    case FaultPhase::kCombine:
      return wait.starts_with("combine");
    default:
      return false;
  }
}

// Strikes once, at the moment of the case, if this rank is the victim.
class Trap {
 public:
  Trap(const FaultCase& fault, bool is_victim) : fault_(fault), is_victim_(is_victim) {}
  void arm() { armed_ = is_victim_; }
  bool disagrees() const { return fault_.fault == Fault::kDisagrees; }

  void at_wait(std::string_view wait) {
    if (is_wait_of(fault_.phase, wait) && !disagrees()) strike();
    if (wait.starts_with("dispatch.rows")) behind_dispatch_ = true;
    if (wait.starts_with("combine")) behind_dispatch_ = false;
  }
  void at_region() {
    if (behind_dispatch_ && fault_.phase == FaultPhase::kProducts) strike();
  }
  void at_roll_call() {
    if (fault_.phase == FaultPhase::kSurvivors) strike();
  }
  // True if this rank is to begin something else than the operation that the wait will be for.
  bool begins_another(uint64_t operation) {
    const bool hits = armed_ && disagrees() && operation == wrong_operation_;
    if (hits) armed_ = false;
    return hits;
  }
  // Operations of a forward, counted from 0, and the waits for them: learnt from one that works.
  void learn(uint64_t operation, std::string_view wait) {
    if (is_wait_of(fault_.phase, wait)) wrong_operation_ = std::min(wrong_operation_, operation);
  }

 private:
  void strike() {
    if (!armed_) return;
    switch (fault_.fault) {
      case Fault::kDies:
      case Fault::kStops:
        armed_ = false;
        fault_.strike(fault_.fault);
        return;
      case Fault::kThrows:
        armed_ = false;
        throw std::runtime_error("planted");
      case Fault::kNeverCalls:
        armed_ = false;
        std::this_thread::sleep_for(fault_.deadline * 3);
        return;
      case Fault::kIsSlow:
        std::this_thread::sleep_for(fault_.deadline / 20);
        return;
      case Fault::kDisagrees:
        return;
    }
  }

  const FaultCase& fault_;
  bool is_victim_;
  bool armed_ = false;
  std::atomic<bool> behind_dispatch_{false};
  uint64_t wrong_operation_ = UINT64_MAX;
};

class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, Trap& trap)
      : inner_(std::move(inner)), trap_(trap) {}

  std::string_view name() const noexcept override { return inner_->name(); }
  int32_t rank() const noexcept override { return inner_->rank(); }
  int32_t size() const noexcept override { return inner_->size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return inner_->timeout(); }
  Support supports(CommFeature feature) const override { return inner_->supports(feature); }

  void count_from_here() { begun_.clear(); }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    const auto place = std::ranges::find(begun_, handle.sequence);
    if (place != begun_.end()) trap_.learn(static_cast<uint64_t>(place - begun_.begin()), phase);
    try {
      trap_.at_wait(phase);
    } catch (const std::runtime_error&) {
      settle(handle, deadline, phase);
      throw;
    }
    inner_->wait(handle, deadline, phase);
  }
  bool test(CommHandle handle, std::string_view phase) override {
    return inner_->test(handle, phase);
  }
  void check(std::string_view phase) override { inner_->check(phase); }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }
  Survivors shrink(std::chrono::nanoseconds deadline, std::string_view phase) override {
    trap_.at_roll_call();
    return inner_->shrink(deadline, phase);
  }

 protected:
  CommHandle start(const CommOperation& operation) override {
    const bool another = trap_.begins_another(begun_.size());
    const CommHandle handle = another ? inner_->begin_barrier() : inner_->begin(operation);
    begun_.push_back(handle.sequence);
    return handle;
  }

 private:
  // Callers free their buffers as soon as a wait has thrown, so no peer may still write to them.
  void settle(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) {
    try {
      inner_->wait(handle, deadline, phase);
    } catch (const CommError&) {
      return;  // the planted error is the one to tell
    }
  }

  std::unique_ptr<Communicator> inner_;
  Trap& trap_;
  std::vector<uint64_t> begun_;
};

class FaultyExecutor final : public Executor {
 public:
  explicit FaultyExecutor(Trap& trap) : trap_(trap) {}
  int32_t concurrency() const noexcept override { return 1; }
  void run(ParallelTask task) override {
    trap_.at_region();
    task.invoke(task.state, 0);
  }

 private:
  Trap& trap_;
};

// The layer of every case, with the tokens and the result of one rank alone.
struct Problem {
  explicit Problem(int32_t rank)
      : spec(make_spec(8, 2, 64, 48, DType::kBF16)),
        source(make_synthetic_source(spec, 11)),
        hidden(random_tensor(DType::kBF16, 40 + rank, 64, static_cast<uint64_t>(rank) + 1)) {
    const OwnedLayer alone = make_layer(spec, {.max_tokens = 64}, {.num_threads = 1});
    expected = run_layer(alone.layer, hidden.view(), DType::kBF16).out;
  }
  bool is_right(const MoeLayer& layer) const {
    return same_bits(run_layer(layer, hidden.view(), DType::kBF16).out, expected);
  }
  ParallelSpec split(int32_t ranks, int32_t rank, bool has_replicas) const {
    const ParallelSpec plain{.ep_size = ranks, .ep_rank = rank};
    if (!has_replicas) return plain;
    const std::vector<double> load(static_cast<size_t>(spec.num_experts), 1.0);
    return with_slots(plain, balance_experts(load, {.rule = "surviving",
                                                    .num_ranks = ranks,
                                                    .num_redundant_experts =
                                                        static_cast<int32_t>(spec.num_experts)}));
  }

  MoeSpec spec;
  std::unique_ptr<WeightSource> source;
  Tensor hidden;
  Tensor expected;
};

void note(const CommError& error, FaultReport& report) {
  report.error_ns = steady_ns();
  report.code = conclave::to_string(error.code());
  report.peer = error.peer();
  report.phase = error.phase();
}

std::string joined(const std::vector<int32_t>& ranks) {
  std::string text;
  for (const int32_t rank : ranks) text += (text.empty() ? "" : ".") + std::to_string(rank);
  return text;
}

}  // namespace

template <class Value, size_t N>
Value value_of(const std::array<std::pair<Value, const char*>, N>& names, std::string_view name) {
  for (const auto& [value, known] : names) {
    if (name == known) return value;
  }
  throw std::invalid_argument("no such fault or phase: " + std::string(name));
}
Fault fault_of(const std::string& name) { return value_of(kFaults, name); }
FaultPhase phase_of(const std::string& name) { return value_of(kPhases, name); }
std::string to_string(Fault fault) { return kFaults[static_cast<size_t>(fault)].second; }
std::string to_string(FaultPhase phase) { return kPhases[static_cast<size_t>(phase)].second; }

bool is_possible(Fault fault, FaultPhase phase) {
  return fault != Fault::kDisagrees ||
         (phase != FaultPhase::kProducts && phase != FaultPhase::kSurvivors);
}

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

FaultReport run_fault(std::unique_ptr<Communicator> communicator, const FaultCase& fault) {
  FaultReport report;
  const int32_t ranks = communicator->size();
  const int32_t me = communicator->rank();
  const Problem problem(me);
  Trap trap(fault, me == fault.victim);
  FaultyExecutor executor(trap);
  FaultyCommunicator comm(std::move(communicator), trap);
  const Context context({.executor = &executor, .communicator = &comm});
  LayerOptions options{.max_tokens = 64};
  if (fault.overlaps) {
    options.chunk_order = ChunkOrder::kMicroBatches;
    options.micro_batch_tokens = 2;
  }
  const ParallelSpec split = problem.split(ranks, me, fault.has_replicas);
  std::unique_ptr<MoeLayer> layer;
  const auto create = [&] {
    layer = std::make_unique<MoeLayer>(
        MoeLayer::create(context, problem.spec, *problem.source, options, split));
  };
  comm.barrier("ready");
  try {
    comm.count_from_here();
    if (fault.phase != FaultPhase::kCreate) {
      create();
      comm.count_from_here();
      report.is_right = problem.is_right(*layer);
    } else if (trap.disagrees()) {
      create();  // to learn its operations
      report.is_right = true;
    } else {
      report.is_right = true;
    }
    comm.barrier("ready");
    comm.count_from_here();
    trap.arm();
    report.begin_ns = steady_ns();
    if (fault.phase == FaultPhase::kCreate) create();
    if (fault.phase == FaultPhase::kSurvivors) {
      throw CommError(ErrorCode::kCommAborted, -1, "planted", "the group is given up");
    }
    // One forward meets the fault; the next one, what it has left behind.
    for (int forward = 0; forward < 3; ++forward) {
      report.is_right = problem.is_right(*layer) && report.is_right;
      comm.count_from_here();
    }
    return report;
  } catch (const CommError& error) {
    note(error, report);
  }
  try {
    const Survivors left = survivors(comm, {.deadline = fault.deadline});
    report.went_on = joined(left.old_ranks);
    const Context fewer({.num_threads = 1, .communicator = left.communicator.get()});
    const ParallelSpec next =
        without_ranks(problem.spec.num_experts, split, left.old_ranks, left.communicator->rank());
    const WeightSource* const source = fault.has_replicas ? nullptr : problem.source.get();
    const MoeLayer again =
        layer ? layer->on_ranks(fewer, next, source)
              : MoeLayer::create(fewer, problem.spec, *problem.source, options, next);
    report.is_right = problem.is_right(again) && report.is_right;
    report.correct_ns = steady_ns();
    // Nobody leaves before all have their results.
    left.communicator->barrier("done");
  } catch (const CommError& error) {
    if (report.went_on != "-") throw;
    report.went_on = conclave::to_string(error.code());
  }
  return report;
}

}  // namespace conclave::testing
