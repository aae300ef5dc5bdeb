#include "conclave/balancer.h"

#include "core/checked.h"
#include "core/max_ranks.h"
#include "layer/balancer/load_window.h"
#include "layer/migration/move_rounds.h"
#include "layer/moe_layer_impl.h"

#include "conclave/balance.h"
#include "conclave/comm.h"
#include "conclave/error.h"
#include "conclave/layer.h"
#include "conclave/migration.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr const char* kSumPhase = "balancer: add up the load";
constexpr int64_t kMostSteps = 1 << 24;

void check_range(const char* field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = std::string("BalancerOptions.") + field + " is out of range",
               .tensor = field,
               .found = std::to_string(value),
               .limit = fmt::format("{} to {}", least, most)});
}

// Said at once, and not when the first rebalance is due.
void check_moves(const MoeLayer& layer) {
  const Support support = LayerAccess::of(layer).moves_experts();
  if (support) return;
  throw Error(ErrorCode::kUnsupported, {.what = "the experts of a layer do not move",
                                        .tensor = "layers",
                                        .found = support.reason()});
}

void check_options(const std::vector<MoeLayer*>& layers, const BalancerOptions& options) {
  const auto missing = [](const char* field, const char* what) {
    throw Error(ErrorCode::kInvalidArgument, {.what = what, .tensor = field});
  };
  if (options.communicator == nullptr) {
    missing("communicator", "a balancer needs a communicator of its own");
  }
  if (layers.empty()) missing("layers", "a balancer needs layers");
  if (std::ranges::count(layers, nullptr) > 0) missing("layers", "a layer is null");
  for (const MoeLayer* layer : layers) {
    check_moves(*layer);
    if (layer->parallel().reduce == Reduce::kFull) continue;
    throw Error(ErrorCode::kUnsupported,
                {.what = "a balancer moves experts of layers that add up over their ranks",
                 .tensor = "layers",
                 .found = "Reduce::kPartial"});
  }
  check_range("window_size", options.window_size, 1, kMostSteps);
  check_range("step_interval", options.step_interval, 1, kMostSteps);
  check_range("log_balancedness_interval", options.log_balancedness_interval, 1, kMostSteps);
  check_range("num_nodes", options.num_nodes, 1, kMaxRanks);
  if (!(options.least_gain >= 0 && options.least_gain <= 1)) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "BalancerOptions.least_gain is a part of a load",
                 .tensor = "least_gain",
                 .found = std::to_string(options.least_gain),
                 .limit = "0 to 1"});
  }
  // A migration would look at these in a step: late, and on one rank alone.
  check_migration_options(
      {.processor_share = options.processor_share, .piece_bytes = options.piece_bytes});
  if (std::ranges::count(balance_rules(), options.rule) == 0) {
    throw Error(ErrorCode::kUnknownName,
                {.what = "no rule of this name", .tensor = "rule", .found = options.rule});
  }
}

size_t counters_of(const std::vector<MoeLayer*>& layers, const BalancerOptions& options) {
  int64_t counters = 0;
  for (const MoeLayer* layer : layers) counters += layer->spec().num_experts;
  if (!checked_mul(counters, options.window_size)) {
    throw Error(ErrorCode::kSizeOverflow,
                {.what = "the window does not fit 63 bits", .tensor = "window_size"});
  }
  return static_cast<size_t>(counters);
}

std::vector<double> as_doubles(std::span<const int64_t> rows) { return {rows.begin(), rows.end()}; }

bool has_rows(std::span<const double> load) {
  return std::ranges::any_of(load, [](double rows) { return rows > 0; });
}

// Rows of each rank if replicas share those of their expert evenly.
std::vector<double> rows_of_ranks(std::span<const double> load, const ExpertSlots& slots) {
  std::vector<double> replicas(load.size(), 0);
  for (const int32_t expert : slots.logical_of) ++replicas[static_cast<size_t>(expert)];
  std::vector<double> ranks;
  for (int32_t rank = 0; rank < slots.num_ranks(); ++rank) {
    double rows = 0;
    for (const int32_t expert : slots.of_rank(rank)) {
      const auto at = static_cast<size_t>(expert);
      rows += load[at] / replicas[at];
    }
    ranks.push_back(rows);
  }
  return ranks;
}

}  // namespace

struct Balancer::Impl {
  Impl(const Context& log, std::vector<MoeLayer*> of, const BalancerOptions& given)
      : context(log),
        layers(std::move(of)),
        options(given),
        window(counters_of(layers, options), options.window_size),
        until_rebalance(std::max<int64_t>(options.step_interval / 4, 1)) {
    size_t first = 0;
    for (const MoeLayer* layer : layers) {
      first_counter.push_back(first);
      first += static_cast<size_t>(layer->spec().num_experts);
    }
  }
  ~Impl() {
    // The operation would write to memory that is gone.
    if (adding && !options.communicator->test(*adding, kSumPhase)) {
      options.communicator->abort("a rank ended its balancer");
    }
  }

  template <class Counter>
  std::span<Counter> of_layer(std::span<Counter> counters, size_t layer) const {
    return counters.subspan(first_counter[layer],
                            static_cast<size_t>(layers[layer]->spec().num_experts));
  }
  bool is_moving() const { return adding || next_layer > 0; }

  void step();
  void measure();
  void add_up();
  bool advance();
  bool take_sums();
  std::optional<ExpertSlots> slots_for(size_t layer) const;
  void begin_layer(size_t layer, const ExpertSlots& slots);
  bool end_layer();
  void fail();

  const Context& context;
  std::vector<MoeLayer*> layers;
  BalancerOptions options;
  LoadWindow window;
  std::vector<size_t> first_counter;
  BalancerStatus counts;

  int64_t until_rebalance;
  bool is_due = false;
  bool has_failed = false;
  std::optional<CommHandle> adding;
  std::vector<int64_t> own_sums;
  std::vector<int64_t> sums;  // the same, added up over all ranks
  size_t next_layer = 0;      // 1 and more: layers before it are done
  std::unique_ptr<Migration> migration;
};

// The mean of the ranks' rows over the largest, both added up over layers.
void Balancer::Impl::measure() {
  double mean = 0;
  double largest = 0;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const std::vector<double> load = as_doubles(of_layer(std::as_const(window).now(), layer));
    const std::vector<double> rows = rows_of_ranks(load, layers[layer]->slots());
    double sum = 0;
    for (const double of_rank : rows) sum += of_rank;
    mean += sum / static_cast<double>(rows.size());
    largest += std::ranges::max(rows);
  }
  counts.balancedness = largest > 0 ? mean / largest : 1;
  if (!options.log_balancedness || counts.steps % options.log_balancedness_interval != 0) return;
  context.log(LogLevel::kInfo,
              fmt::format("balancer: step {}, balancedness {:.3f}, mean {:.1f} rows a rank, "
                          "largest {:.1f}",
                          counts.steps, counts.balancedness, mean, largest));
}

// All ranks get the same sums, whatever step of theirs each one is at.
void Balancer::Impl::add_up() {
  own_sums.assign(window.sums().begin(), window.sums().end());
  sums.assign(own_sums.size(), 0);
  ++counts.rebalances;
  adding = options.communicator->begin_all_reduce(std::as_bytes(std::span(own_sums)),
                                                  std::as_writable_bytes(std::span(sums)),
                                                  DType::kI64, ReduceOp::kSum);
}

bool Balancer::Impl::take_sums() {
  if (!adding) return true;
  Communicator& communicator = *options.communicator;
  if (options.use_async && !communicator.test(*adding, kSumPhase)) return false;
  communicator.wait(*std::exchange(adding, std::nullopt), communicator.timeout(), kSumPhase);
  next_layer = 1;
  return true;
}

// Rules take what lies where now only where ranks have as many slots as they would give them.
std::vector<int32_t> previous_slots(const ExpertSlots& now, const ParallelSpec& parallel) {
  const ExpertSlots linear = slots_of(
      now.num_experts,
      {.ep_size = parallel.ep_size, .num_redundant_experts = parallel.num_redundant_experts});
  return now.first_of == linear.first_of ? now.logical_of : std::vector<int32_t>();
}

// Nothing for a layer whose experts had no rows.
std::optional<ExpertSlots> Balancer::Impl::slots_for(size_t layer) const {
  const std::vector<double> load = as_doubles(of_layer(std::span<const int64_t>(sums), layer));
  if (!has_rows(load)) return std::nullopt;
  const MoeLayer& of = *layers[layer];
  ExpertSlots now = of.slots();
  const BalanceRequest request{.rule = options.rule,
                               .num_ranks = of.parallel().ep_size,
                               .num_redundant_experts = of.parallel().num_redundant_experts,
                               .num_nodes = options.num_nodes,
                               .num_groups = of.spec().router.num_groups,
                               .previous = previous_slots(now, of.parallel()),
                               .least_gain = options.least_gain};
  ExpertSlots next = balance_experts(load, request);
  if (options.log_balancedness) {
    context.log(
        LogLevel::kInfo,
        fmt::format("balancer: layer {}, {} experts move, balancedness {:.3f} to {:.3f}", layer,
                    moved_experts(now, next), balancedness(load, now), balancedness(load, next)));
  }
  return next;
}

void Balancer::Impl::begin_layer(size_t layer, const ExpertSlots& slots) {
  const MigrationOptions migration_options{.communicator = options.communicator,
                                           .processor_share = options.processor_share,
                                           .piece_bytes = options.piece_bytes};
  if (options.use_async) {
    migration = std::make_unique<Migration>(*layers[layer], slots, migration_options);
  } else {
    counts.experts_moved += moved_experts(layers[layer]->slots(), slots);
    layers[layer]->update_placement(slots, migration_options);
  }
}

// True once the layer's experts are where they should be.
bool Balancer::Impl::end_layer() {
  if (!migration) return true;
  migration->check();
  const MigrationStatus status = migration->status();
  if (!status.is_done) return false;
  counts.experts_moved += status.experts_moved;
  migration.reset();
  return true;
}

// True while there is more to do in this step.
bool Balancer::Impl::advance() {
  if (!take_sums() || !end_layer()) return false;
  if (next_layer > layers.size()) {
    next_layer = 0;
    return false;
  }
  const size_t layer = next_layer++ - 1;
  if (const std::optional<ExpertSlots> slots = slots_for(layer)) begin_layer(layer, *slots);
  return true;
}

void Balancer::Impl::step() {
  ++counts.steps;
  measure();
  window.close_step();
  if (has_failed) return;
  if (--until_rebalance <= 0) {
    until_rebalance = options.step_interval;
    is_due = true;
  }
  if (is_due && !is_moving()) {
    is_due = false;
    add_up();
  }
  if (!is_moving()) return;
  try {
    while (advance()) {
    }
  } catch (const Error&) {
    has_failed = true;
    adding.reset();
    migration.reset();
    next_layer = 0;
    throw;
  }
}

Balancer::Balancer(const Context& context, std::vector<MoeLayer*> layers,
                   const BalancerOptions& options) {
  check_options(layers, options);
  impl_ = std::make_unique<Impl>(context, std::move(layers), options);
}

Balancer::~Balancer() = default;

std::span<int64_t> Balancer::load(size_t layer) {
  if (layer < impl_->layers.size()) return impl_->of_layer(impl_->window.now(), layer);
  throw Error(ErrorCode::kInvalidArgument, {.what = "the balancer has no such layer",
                                            .tensor = "layer",
                                            .found = std::to_string(layer),
                                            .limit = std::to_string(impl_->layers.size() - 1)});
}

void Balancer::step() { impl_->step(); }

void Balancer::rebalance() { impl_->is_due = true; }

BalancerStatus Balancer::status() const {
  BalancerStatus status = impl_->counts;
  status.is_moving = impl_->is_moving();
  return status;
}

}  // namespace conclave::inline v0
