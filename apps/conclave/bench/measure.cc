#include "bench/measure.h"

#include "layer_run.h"

#include "conclave/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

namespace conclave::tool {
namespace {

// Rows of hidden states kept ready, so that calls do not all read the same ones.
constexpr int64_t kHiddenRows = 4096;
constexpr int64_t kMostBatches = 64;

int64_t layers_needed(const MoeSpec& spec) {
  const double layer_bytes = static_cast<double>(spec.num_experts) * expert_bytes(spec);
  const double needed = std::ceil(static_cast<double>(kReuseDistanceBytes) / layer_bytes);
  return static_cast<int64_t>(std::clamp(needed, 1.0, double{BenchLayers::kMostLayers}));
}

// Times of repetitions, each for a single call.
struct PairedTimes {
  void add(bool with, double ms) { (with ? with_ms : without_ms).push_back(ms); }

  // The median of the pairs' ratios; 0 without pairs.
  double ratio() const {
    std::vector<double> ratios;
    for (size_t i = 0; i < with_ms.size(); ++i) ratios.push_back(with_ms[i] / without_ms[i]);
    return summarise(std::move(ratios)).median_ms;
  }

  std::vector<double> without_ms;
  std::vector<double> with_ms;
};

}  // namespace

Timing summarise(std::vector<double> samples_ms) {
  if (samples_ms.empty()) return {};
  std::sort(samples_ms.begin(), samples_ms.end());
  const size_t count = samples_ms.size();
  const double mean =
      std::accumulate(samples_ms.begin(), samples_ms.end(), 0.0) / static_cast<double>(count);
  double squares = 0;
  for (const double sample : samples_ms) squares += (sample - mean) * (sample - mean);
  return {.mean_ms = mean,
          .std_ms = count > 1 ? std::sqrt(squares / static_cast<double>(count - 1)) : 0,
          .min_ms = samples_ms.front(),
          .median_ms = (samples_ms[(count - 1) / 2] + samples_ms[count / 2]) / 2};
}

struct BenchLayers::Inputs {
  Inputs(const MoeSpec& spec, int64_t tokens, uint64_t seed) : num_tokens(tokens) {
    const int64_t count =
        std::clamp<int64_t>(kHiddenRows / std::max<int64_t>(num_tokens, 1), 1, kMostBatches);
    for (int64_t i = 0; i < count; ++i) {
      hidden.emplace_back(natural_row_dtype(spec), Shape{num_tokens, spec.hidden_size});
      fill_random(hidden.back().view(), seed + static_cast<uint64_t>(i));
    }
    out = Tensor(natural_row_dtype(spec), {num_tokens, spec.hidden_size});
  }

  const Tensor& next_hidden() { return hidden[turn++ % hidden.size()]; }

  int64_t num_tokens;
  std::vector<Tensor> hidden;
  Tensor out;
  size_t turn = 0;
};

BenchLayers::BenchLayers(const RankTeam& team, const Context& context, const NamedShape& shape,
                         const LayerOptions& options, const AdapterLoad& adapters, uint64_t seed,
                         Console& console)
    : team_(team), spec_(shape.spec) {
  const int64_t count = layers_needed(spec_);
  const double bytes = static_cast<double>(count) *
                       (static_cast<double>(spec_.num_experts) * expert_bytes(spec_) +
                        static_cast<double>(adapters.count) * adapter_bytes(spec_, adapters.rank));
  require_memory(static_cast<uint64_t>(bytes), "the layer's weights", "choose a smaller shape");
  size_t workspace_bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    console.subject(count == 1 ? shape.name : fmt::format("{} {}/{}", shape.name, i + 1, count));
    const auto source = make_synthetic_source(spec_, seed + static_cast<uint64_t>(i));
    layers_.push_back(MoeLayer::create(context, spec_, *source, options, team.parallel()));
    add_random_adapters(layers_.back(), adapters, seed + static_cast<uint64_t>(i));
    team.meet("load the layer");
    workspace_bytes = std::max(workspace_bytes, layers_.back().workspace_bytes());
  }
  workspace_.emplace_back(context, workspace_bytes);
  console.subject("");
  console.clear();
}

uint64_t BenchLayers::weight_bytes() const {
  return static_cast<uint64_t>(static_cast<double>(size() * spec_.num_experts) *
                               expert_bytes(spec_));
}

double BenchLayers::run(const std::vector<BenchCall>& calls, Inputs& inputs,
                        const std::vector<int32_t>& adapter_ids) {
  const Shape slots{inputs.num_tokens, spec_.top_k};
  const auto begin = std::chrono::steady_clock::now();
  for (const BenchCall& call : calls) {
    ForwardArgs args{.hidden = inputs.next_hidden().view(), .out = inputs.out.view()};
    if (!call.topk_ids.empty()) {
      args.topk_ids = {.data = call.topk_ids.data(), .dtype = DType::kI32, .shape = slots};
      args.topk_weights = {.data = call.topk_weights.data(), .dtype = DType::kF32, .shape = slots};
    }
    if (adapter_ids.size() == 1) args.adapter = adapter_ids.front();
    if (adapter_ids.size() > 1) {
      args.adapter_ids = {
          .data = adapter_ids.data(), .dtype = DType::kI32, .shape = {inputs.num_tokens}};
    }
    args.workspace = workspace_.data();
    layers_[static_cast<size_t>(call.layer)].forward(args);
  }
  const auto end = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

// Experts that a call hits on any rank. Under the layers' own gates, only a forward shows which: an
// untimed pass counts.
int64_t BenchLayers::count_hits(const std::vector<BenchCall>& calls, Inputs& inputs) {
  const auto experts = static_cast<size_t>(spec_.num_experts);
  const size_t turn = inputs.turn;
  std::vector<int32_t> hit(calls.size() * experts, 0);
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::span<int32_t> of_call = std::span(hit).subspan(i * experts, experts);
    for (const int32_t id : calls[i].topk_ids) of_call[static_cast<size_t>(id)] = 1;
    if (!calls[i].topk_ids.empty()) continue;
    std::vector<int64_t> load(experts, 0);
    layers_[static_cast<size_t>(calls[i].layer)].forward({.hidden = inputs.next_hidden().view(),
                                                          .out = inputs.out.view(),
                                                          .expert_load = load,
                                                          .workspace = workspace_.data()});
    for (size_t e = 0; e < experts; ++e) of_call[e] = load[e] > 0 ? 1 : 0;
  }
  inputs.turn = turn;
  team_.take_largest(hit, "count the experts hit");
  return std::count(hit.begin(), hit.end(), 1);
}

Measurement BenchLayers::measure(int64_t num_tokens, const MeasureOptions& options) {
  // Ranks of a tensor group bring the same tokens, others their own.
  const uint64_t seed = options.seed + static_cast<uint64_t>(team_.ep_rank()) * 1'000'003;
  Inputs inputs(spec_, num_tokens, seed);
  RoutingRing ring(spec_, size(), options.routing, seed);
  const auto make_calls = [&](int64_t count) {
    std::vector<BenchCall> calls;
    for (int64_t i = 0; i < count; ++i) calls.push_back(ring.next(num_tokens));
    return calls;
  };
  const bool has_adapters = options.adapters.rank > 0;
  std::vector<int32_t> adapter_ids;
  if (has_adapters) {
    adapter_ids = adapters_in_turn(options.adapters, options.adapters.count == 1 ? 1 : num_tokens);
  }
  // Runs every layer once, which also tells how many calls fill a repetition.
  const double first_ms =
      team_.largest(run(make_calls(size()), inputs, {}), "time the first calls") /
      static_cast<double>(size());
  const double wanted = std::ceil(options.min_seconds * 1e3 / std::max(first_ms, 1e-4));
  constexpr double kMostCalls = 4096;
  const int64_t turns =
      static_cast<int64_t>(std::ceil(std::min(wanted, kMostCalls) / static_cast<double>(size())));
  const int64_t calls_per_repetition = turns * size();

  Measurement result;
  PairedTimes times;
  for (int32_t i = -options.warmup; i < options.repetitions; ++i) {
    std::vector<BenchCall> calls = make_calls(calls_per_repetition);
    const int64_t hits = i >= 0 ? count_hits(calls, inputs) : 0;
    const size_t turn = inputs.turn;
    const auto time = [&](bool with) {
      inputs.turn = turn;  // both ways have the same rows
      team_.meet("begin a repetition");
      const double ms = team_.largest(
          run(calls, inputs, with ? adapter_ids : std::vector<int32_t>()), "time a repetition");
      if (i >= 0) times.add(with, ms / static_cast<double>(calls.size()));
    };
    // Which way comes first alternates: a machine that slows down favours neither.
    const bool with_first = has_adapters && i % 2 != 0;
    if (with_first) time(true);
    time(false);
    if (has_adapters && !with_first) time(true);
    if (i < 0) continue;
    result.calls += static_cast<int64_t>(calls.size());
    result.experts_hit += static_cast<double>(hits);
  }
  result.timing = summarise(times.without_ms);
  result.with_adapters = summarise(times.with_ms);
  result.adapter_ratio = times.ratio();
  result.experts_hit /= static_cast<double>(std::max<int64_t>(result.calls, 1));

  const int64_t all_tokens = num_tokens * team_.ep_size();
  const std::vector<int64_t> one_row_per_slot(1, all_tokens * spec_.top_k);
  const LayerWork work = layer_work(spec_, all_tokens, one_row_per_slot);
  result.flops = work.flops;
  // layer_work counted one expert; the shared expert's bytes are already included.
  result.weight_bytes = work.weight_bytes + (result.experts_hit - 1) * expert_bytes(spec_);
  return result;
}

}  // namespace conclave::tool
