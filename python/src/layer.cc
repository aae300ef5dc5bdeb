#include "layer.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace conclave::python {
namespace {

// One thread computes this many products in the few microseconds that a call's threads take to
// meet.
constexpr int64_t kMaxProductsAlone = 200'000;
// There is room for every power of two: a list that never moves is intact in a child forked
// meanwhile.
constexpr size_t kMostPlans = 64;

void add(StageTimings& total, const StageTimings& part) {
  total.route_ns += part.route_ns;
  total.dispatch_ns += part.dispatch_ns;
  total.experts_ns += part.experts_ns;
  total.shared_ns += part.shared_ns;
  total.combine_ns += part.combine_ns;
  total.total_ns += part.total_ns;
}

}  // namespace

// Counters for one call; there are as many as calls run at the same time.
class PyLayer::CountersLease {
 public:
  explicit CountersLease(PyLayer& layer) : state_(layer.state_.get()) {
    if (!layer.counts_) return;
    const std::lock_guard lock(state_.counters_mutex);
    if (state_.idle.empty()) {
      state_.counters.push_back(std::make_unique<Counters>());
      state_.counters.back()->load.resize(static_cast<size_t>(layer.layer().spec().num_experts));
      state_.idle.push_back(state_.counters.back().get());
    }
    counters_ = state_.idle.back();
    state_.idle.pop_back();
  }
  ~CountersLease() {
    if (counters_ == nullptr) return;
    const std::lock_guard lock(state_.counters_mutex);
    state_.idle.push_back(counters_);
  }
  CountersLease(const CountersLease&) = delete;
  CountersLease& operator=(const CountersLease&) = delete;

  void fill(ForwardArgs& args) const {
    if (counters_ == nullptr) return;
    args.expert_load = counters_->load;
    args.timings = &counters_->timings;
  }

 private:
  State& state_;
  Counters* counters_ = nullptr;
};

PyLayer::PyLayer(const LayerRequest& request, const WeightSource& source,
                 std::shared_ptr<const WeightSource> kept)
    : context_(request.context),
      kept_(std::move(kept)),
      counts_(request.counting == Counting::kOn) {
  run_interruptible([&] {
    plans_.reserve(kMostPlans);
    adopt(MoeLayer::create(context_->context(), request.spec, source, request.options,
                           request.parallel));
    prepare_counting();
  });
}

PyLayer::PyLayer(PyLayer& from, std::shared_ptr<PyContext> context, const ParallelSpec& parallel,
                 const WeightSource* source, std::shared_ptr<const WeightSource> kept)
    : context_(std::move(context)), kept_(std::move(kept)), counts_(from.counts_) {
  run_interruptible([&] {
    const std::shared_lock weights(from.state_.get().weights_mutex);
    plans_.reserve(kMostPlans);
    adopt(from.layer().on_ranks(context_->context(), parallel, source));
    prepare_counting();
  });
  grow_with_calls(
      {.max_tokens = from.grows_to_.load(), .max_workspace_bytes = from.grows_to_bytes_.load()});
}

PyLayer::PyLayer(PyLayer& from, std::shared_ptr<PyContext> context, const RegroupOptions& options)
    : context_(std::move(context)), counts_(from.counts_) {
  run_interruptible([&] {
    const std::shared_lock weights(from.state_.get().weights_mutex);
    plans_.reserve(kMostPlans);
    adopt(regroup(from.first_layer(), context_->context(), options));
    prepare_counting();
  });
  grow_with_calls(
      {.max_tokens = from.grows_to_.load(), .max_workspace_bytes = from.grows_to_bytes_.load()});
}

PyLayer::PyLayer(const LayerRequest& request, const RegroupOptions& options)
    : context_(request.context), counts_(request.counting == Counting::kOn) {
  run_interruptible([&] {
    plans_.reserve(kMostPlans);
    adopt(join_layer(context_->context(), request.spec, request.options, options));
    prepare_counting();
  });
}

void PyLayer::hand_over(const RegroupOptions& options) {
  run_interruptible([&] {
    const std::shared_lock weights(state_.get().weights_mutex);
    conclave::hand_over(first_layer(), options);
  });
}

void PyLayer::prepare_counting() {
  const int64_t products = count_parameters(layer().spec()).active;
  max_tokens_alone_ = kMaxProductsAlone / std::max<int64_t>(products, 1);
  if (!counts_ || !context_->device().is_cuda) return;
  queue_.emplace(context_->context());
  device_load_ = queue_->allocate(DType::kI64, {layer().spec().num_experts});
  queue_->fill(device_load_.view(), 0);
  queue_->synchronize();
}

void PyLayer::adopt(MoeLayer layer) {
  plans_.push_back(std::make_unique<MoeLayer>(std::move(layer)));
  if (first_ == nullptr) first_ = plans_.back().get();
  largest_.store(plans_.back().get(), std::memory_order_release);
}

void PyLayer::plan_for(int64_t max_tokens) {
  const nb::gil_scoped_release released;
  const std::shared_lock weights(state_.get().weights_mutex);
  const std::lock_guard lock(state_.get().plans_mutex);
  if (max_tokens > layer().plan().max_tokens) adopt(layer().with_max_tokens(max_tokens));
}

void PyLayer::grow_with_calls(const Growth& limits) noexcept {
  grows_to_bytes_.store(limits.max_workspace_bytes);
  grows_to_.store(limits.max_tokens);
}

const MoeLayer& PyLayer::layer_for(int64_t tokens) {
  const MoeLayer& found = layer();
  const int64_t planned = found.plan().max_tokens;
  if (tokens <= planned || grows_to_.load(std::memory_order_relaxed) <= planned) return found;
  return grown(tokens);
}

// Nothing where calls of so many tokens could have no memory on this machine.
static std::optional<MoeLayer> planned_for(const MoeLayer& layer, int64_t tokens) {
  try {
    return layer.with_max_tokens(tokens);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    return std::nullopt;
  }
}

// Plans for the next power of two, or the largest one below it whose workspace is within the limit.
// A size that was too large once is not tried again.
const MoeLayer& PyLayer::grown(int64_t tokens) {
  const std::lock_guard lock(state_.get().plans_mutex);
  const int64_t planned = layer().plan().max_tokens;
  const int64_t limit = grows_to_.load();
  int64_t wanted = limit;
  if (tokens < limit) {
    wanted = std::min(limit, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens))));
  }
  for (; wanted > planned; wanted /= 2) {
    std::optional<MoeLayer> larger = planned_for(layer(), wanted);
    if (larger && larger->workspace_bytes() <= grows_to_bytes_.load()) {
      adopt(*std::move(larger));
      break;
    }
    grows_to_.store(wanted / 2);
  }
  return layer();
}

size_t PyLayer::workspace_bytes(int64_t tokens) {
  const nb::gil_scoped_release released;
  const std::shared_lock weights(state_.get().weights_mutex);
  return layer_for(tokens).workspace_bytes(tokens);
}

void PyLayer::forward(const CallObjects& call, uintptr_t stream) {
  CallViews views(call, context_->device(), stream);
  ForwardArgs& args = views.args;
  const bool is_cuda = context_->device().is_cuda;
  const int64_t tokens = args.hidden.shape.rank() == 2 ? args.hidden.shape[0] : 0;
  const AloneScope alone(args.hidden.shape.rank() == 2 && tokens <= max_tokens_alone_);
  const nb::gil_scoped_release released;
  const std::shared_lock weights(state_.get().weights_mutex);
  const MoeLayer& layer = layer_for(tokens);
  std::optional<CountersLease> counters;
  if (is_cuda && counts_) {
    args.expert_load = {device_load_.as<int64_t>(), static_cast<size_t>(layer.spec().num_experts)};
  } else if (!is_cuda) {
    counters.emplace(*this);
    counters->fill(args);
  }
  if (views.workspace.data() != nullptr) {
    Workspace workspace(context_->context(), views.workspace, args.stream);
    args.workspace = &workspace;
    layer.forward(args);
    return;
  }
  WorkspaceLease lease(*context_, layer.workspace_bytes(tokens), args.stream);
  args.workspace = &lease.workspace();
  layer.forward(args);
}

void PyLayer::reload(const WeightSource& source, ReloadMode mode,
                     std::shared_ptr<const WeightSource> kept) {
  run_interruptible([&] {
    const std::unique_lock weights(state_.get().weights_mutex);
    plans_.back()->reload(source, mode);
  });
  kept_ = std::move(kept);
}

void PyLayer::update_placement(const ExpertSlots& slots, const MigrationOptions& options) {
  run_interruptible([&] {
    const std::unique_lock weights(state_.get().weights_mutex);
    plans_.back()->update_placement(slots, options);
  });
}

std::unique_ptr<Migration> PyLayer::begin_migration(const ExpertSlots& slots,
                                                    const MigrationOptions& options) {
  const nb::gil_scoped_release released;
  const std::lock_guard lock(state_.get().plans_mutex);
  return std::make_unique<Migration>(*plans_.back(), slots, options);
}

std::unique_ptr<Refit> PyLayer::begin_refit(const RefitOptions& options) {
  const nb::gil_scoped_release released;
  const std::lock_guard lock(state_.get().plans_mutex);
  return std::make_unique<Refit>(*plans_.back(), options);
}

void PyLayer::withdraw_refit(Communicator* communicator, const std::string& reason) {
  static_cast<void>(state_.get());  // after a fork there are no ranks to tell
  const nb::gil_scoped_release released;
  Refit::withdraw(layer(), communicator, reason);
}

std::vector<int64_t> PyLayer::total_load(StageTimings& timings) {
  std::vector<int64_t> load(static_cast<size_t>(layer().spec().num_experts));
  if (queue_) {
    queue_->download(device_load_.const_view(),
                     {load.data(), DType::kI64, {layer().spec().num_experts}});
    return load;
  }
  State& state = state_.get();
  const std::lock_guard lock(state.counters_mutex);
  for (const auto& counters : state.counters) {
    for (size_t expert = 0; expert < load.size(); ++expert) load[expert] += counters->load[expert];
    add(timings, counters->timings);
  }
  return load;
}

nb::dict PyLayer::timings_of(const StageTimings& total) const {
  nb::dict dict;
  dict["route_ns"] = total.route_ns;
  dict["dispatch_ns"] = total.dispatch_ns;
  dict["experts_ns"] = total.experts_ns;
  dict["shared_ns"] = total.shared_ns;
  dict["combine_ns"] = total.combine_ns;
  dict["total_ns"] = total.total_ns;
  return dict;
}

nb::dict PyLayer::stats() {
  StageTimings timings;
  const std::vector<int64_t> load = total_load(timings);
  const LayerStatus status = layer().status();
  nb::dict dict;
  dict["forwards"] = status.forwards;
  dict["tokens"] = status.tokens;
  dict["skipped_ids"] = status.skipped_ids;
  dict["tokens_without_finite_logit"] = status.tokens_without_finite_logit;
  dict["refit_epoch"] = status.refit_epoch;
  dict["gate_rows_with_nan"] = status.gate_rows_with_nan;
  dict["expert_load"] = counts_ ? nb::cast(load) : nb::none();
  dict["timings"] = counts_ && !queue_ ? nb::object(timings_of(timings)) : nb::none();
  return dict;
}

void PyLayer::reset_stats() {
  if (queue_) {
    queue_->fill(device_load_.view(), 0);
    queue_->synchronize();
  }
  State& state = state_.get();
  const std::lock_guard lock(state.counters_mutex);
  for (const auto& counters : state.counters) {
    std::fill(counters->load.begin(), counters->load.end(), 0);
    counters->timings = {};
  }
}

}  // namespace conclave::python
