#include "bench/device_bench.h"

#include "bench/bench_adapters.h"
#include "layer_run.h"
#include "layer_table.h"
#include "output/numbers.h"
#include "output/table.h"

#include "conclave/device_queue.h"
#include "conclave/error.h"
#include "conclave/synthetic.h"
#include "conclave/version.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

// Published peaks of devices of a kind, from which a floor is computed.
struct DevicePeaks {
  double bytes_per_second = 0;
  double operations_per_second = 0;  // 16-bit products; e4m3 has twice as many
};
DevicePeaks peaks_of(const Plan& plan, int32_t devices) {
  constexpr double kHopperOperations = 989e12;
  const bool is_h200 = plan.device.find("H200") != std::string::npos;
  return {.bytes_per_second = (is_h200 ? 4.8e12 : 3.35e12) * devices,
          .operations_per_second = kHopperOperations * devices};
}

// Forwards per graph: many if one is short, since each replay has a cost of its own.
int64_t forwards_of_graph(int64_t tokens, int64_t layers) {
  const int64_t wanted = tokens <= 64 ? 8 : tokens <= 1024 ? 3 : 1;
  return std::max(wanted, layers);
}

// One forward's inputs on the device.
struct DeviceCall {
  int64_t layer = 0;
  DeviceTensor hidden, ids, weights;
  DeviceTensor adapter_ids;       // where tokens take several adapters in turn
  std::vector<int32_t> host_ids;  // empty under the layers' own gates
};

// The adapters of a forward's tokens.
struct AdapterChoice {
  ConstTensorView ids = {};
  int32_t adapter = kNoAdapter;
};

// One for each repetition.
struct Samples {
  std::vector<double> base_ms;
  std::vector<double> adapted_ms;
  std::vector<double> ratios;
};

class DeviceLayers {
 public:
  DeviceLayers(const RankTeam& team, const Context& context, const NamedShape& shape,
               const LayerOptions& options, const MeasureOptions& measure, Console& console)
      : team_(team), spec_(shape.spec), measure_(measure), queue_(context) {
    const double layer_bytes = static_cast<double>(spec_.num_experts) * expert_bytes(spec_);
    const auto count = static_cast<int64_t>(
        std::clamp(std::ceil(static_cast<double>(kReuseDistanceBytes) / layer_bytes), 1.0, 64.0));
    size_t workspace_bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
      console.subject(fmt::format("{} {}/{}", shape.name, i + 1, count));
      const auto source = make_synthetic_source(spec_, measure.seed + static_cast<uint64_t>(i));
      layers_.push_back(MoeLayer::create(context, spec_, *source, options, team.parallel()));
      add_random_adapters(layers_.back(), measure.adapters, measure.seed);
      team.meet("load the layer");
      workspace_bytes = std::max(workspace_bytes, layers_.back().workspace_bytes());
    }
    workspace_.emplace_back(context, workspace_bytes);
    console.subject("");
    console.clear();
  }

  const Plan& plan() const { return layers_.front().plan(); }
  int64_t size() const { return static_cast<int64_t>(layers_.size()); }

  // Collective. Each expert-parallel rank brings so many tokens of its own; the result is that of
  // all ranks, and the times those of the slowest.
  Measurement measure(int64_t tokens) {
    const int64_t forwards = forwards_of_graph(tokens, size());
    const std::vector<DeviceCall> calls = make_calls(tokens, forwards);
    rank_tokens_.assign(static_cast<size_t>(team_.ep_size()), tokens);
    DeviceTensor out = queue_.allocate(row_dtype(), {tokens, spec_.hidden_size});
    constexpr int32_t kReplays = 5;
    const auto time = [&](bool with_adapters) {
      const auto enqueue = [&] {
        for (const DeviceCall& call : calls) {
          forward(call, out.view(), {}, with_adapters ? choice_of(call) : AdapterChoice());
        }
      };
      team_.meet("begin a repetition");
      const double ms = queue_.time_ms(enqueue, kReplays);
      team_.check("time a repetition");
      return team_.largest(ms, "time a repetition") / static_cast<double>(forwards);
    };
    Measurement result;
    result.experts_hit =
        static_cast<double>(count_hits(calls, out.view())) / static_cast<double>(forwards);
    Samples samples;
    for (int32_t i = -measure_.warmup; i < measure_.repetitions; ++i) {
      time_once(time, i, samples);
      if (i >= 0) result.calls += kReplays * forwards;
    }
    result.timing = summarise(samples.base_ms);
    if (!samples.ratios.empty()) {
      result.with_adapters = summarise(samples.adapted_ms);
      result.adapter_ratio = summarise(samples.ratios).median_ms;
    }
    const int64_t all_tokens = tokens * team_.ep_size();
    const std::vector<int64_t> one_row_per_slot(1, all_tokens * spec_.top_k);
    const LayerWork work = layer_work(spec_, all_tokens, one_row_per_slot);
    result.flops = work.flops;
    // layer_work counted one expert; the shared expert's bytes are already included.
    result.weight_bytes = work.weight_bytes + (result.experts_hit - 1) * expert_bytes(spec_);
    return result;
  }

 private:
  DType row_dtype() const { return spec_.weight_dtype == DType::kF16 ? DType::kF16 : DType::kBF16; }

  std::vector<DeviceCall> make_calls(int64_t tokens, int64_t count) {
    // Ranks of a tensor group bring the same tokens, others their own.
    const uint64_t seed = measure_.seed + static_cast<uint64_t>(team_.ep_rank()) * 1'000'003;
    RoutingRing ring(spec_, size(), measure_.routing, seed);
    std::vector<DeviceCall> calls;
    const Shape slots{tokens, spec_.top_k};
    Tensor hidden(row_dtype(), {tokens, spec_.hidden_size});
    for (int64_t i = 0; i < count; ++i) {
      BenchCall made = ring.next(tokens);
      DeviceCall call;
      call.layer = made.layer;
      fill_random(hidden.view(), seed + static_cast<uint64_t>(i));
      call.hidden = queue_.upload(hidden.const_view());
      if (!made.topk_ids.empty()) {
        call.ids =
            queue_.upload({.data = made.topk_ids.data(), .dtype = DType::kI32, .shape = slots});
        call.weights =
            queue_.upload({.data = made.topk_weights.data(), .dtype = DType::kF32, .shape = slots});
        call.host_ids = std::move(made.topk_ids);
      }
      if (measure_.adapters.rank > 0) {
        const std::vector<int32_t> in_turn = adapters_in_turn(measure_.adapters, tokens);
        call.adapter_ids =
            queue_.upload({.data = in_turn.data(), .dtype = DType::kI32, .shape = {tokens}});
      }
      calls.push_back(std::move(call));
    }
    return calls;
  }

  // One adapter is named for all tokens, several token by token.
  AdapterChoice choice_of(const DeviceCall& call) const {
    if (measure_.adapters.count == 1) return {.adapter = 0};
    return {.ids = call.adapter_ids.const_view()};
  }

  // A repetition without adapters and one with them, in turn first; those before the first one
  // counted leave no sample.
  template <class Time>
  void time_once(const Time& time, int32_t number, Samples& samples) const {
    const bool adapts = measure_.adapters.rank > 0;
    const bool adapted_first = adapts && number % 2 != 0;
    double adapted = adapted_first ? time(true) : 0;
    const double base = time(false);
    if (adapts && !adapted_first) adapted = time(true);
    if (number < 0) return;
    samples.base_ms.push_back(base);
    if (!adapts) return;
    samples.adapted_ms.push_back(adapted);
    samples.ratios.push_back(adapted / base);
  }

  void forward(const DeviceCall& call, const TensorView& out, std::span<int64_t> load,
               const AdapterChoice& adapters) {
    layers_[static_cast<size_t>(call.layer)].forward({.hidden = call.hidden.view(),
                                                      .topk_ids = call.ids.view(),
                                                      .topk_weights = call.weights.view(),
                                                      .adapter_ids = adapters.ids,
                                                      .adapter = adapters.adapter,
                                                      .out = out,
                                                      .expert_load = load,
                                                      .rank_tokens = rank_tokens_,
                                                      .workspace = workspace_.data(),
                                                      .stream = queue_.stream()});
  }

  // Experts that the calls hit on any rank. Under the layers' own gates, only a forward shows
  // which.
  int64_t count_hits(const std::vector<DeviceCall>& calls, const TensorView& out) {
    const auto experts = static_cast<size_t>(spec_.num_experts);
    std::vector<int32_t> hit(calls.size() * experts, 0);
    for (size_t i = 0; i < calls.size(); ++i) {
      const std::span<int32_t> of_call = std::span(hit).subspan(i * experts, experts);
      for (const int32_t id : calls[i].host_ids) of_call[static_cast<size_t>(id)] = 1;
      if (!calls[i].host_ids.empty()) continue;
      Tensor load(DType::kI64, {spec_.num_experts});
      DeviceTensor counts = queue_.upload(load.const_view());
      forward(calls[i], out, {counts.as<int64_t>(), experts}, {});
      queue_.download(counts.const_view(), load.view());
      const int64_t* const rows = load.as<int64_t>();
      for (size_t e = 0; e < experts; ++e) of_call[e] = rows[e] > 0 ? 1 : 0;
    }
    team_.take_largest(hit, "count the experts hit");
    return std::count(hit.begin(), hit.end(), 1);
  }

  const RankTeam& team_;
  const MoeSpec spec_;
  const MeasureOptions measure_;
  const DeviceQueue queue_;
  std::vector<MoeLayer> layers_;
  std::vector<Workspace> workspace_;  // one element
  std::vector<int64_t> rank_tokens_;
};

std::vector<Column> columns(size_t model_width, bool has_adapters) {
  std::vector<Column> all = {{"model", "model", static_cast<int>(model_width), Align::kLeft},
                             {"tokens", "tokens", 6, Align::kRight},
                             {"dtype", "", 0, Align::kLeft},
                             {"routing", "", 0, Align::kLeft},
                             {"", "us", 15, Align::kRight},
                             {"us_mean", "", 0, Align::kRight},
                             {"us_std", "", 0, Align::kRight},
                             {"us_min", "min", 8, Align::kRight},
                             {"experts_hit", "experts", 7, Align::kRight},
                             {"tokens_per_s", "tokens/s", 10, Align::kRight},
                             {"tflops", "TFLOP/s", 7, Align::kRight},
                             {"tbps", "TB/s", 5, Align::kRight},
                             {"floor_us", "floor us", 8, Align::kRight},
                             {"floor_share", "of floor", 8, Align::kRight},
                             {"kernel", "kernel", 24, Align::kLeft},
                             {"tile", "tile", 0, Align::kLeft},
                             {"calls", "", 0, Align::kRight},
                             {"commit", "", 0, Align::kLeft},
                             {"device", "", 0, Align::kLeft}};
  if (!has_adapters) return all;
  const std::vector<Column> of_adapters = {
      {"adapter_rank", "", 0, Align::kRight},    {"adapters", "", 0, Align::kRight},
      {"adapted_tokens", "", 0, Align::kLeft},   {"", "with adapters", 15, Align::kRight},
      {"adapter_us_mean", "", 0, Align::kRight}, {"adapter_us_median", "", 0, Align::kRight},
      {"adapter_us_min", "", 0, Align::kRight},  {"adapter_ratio", "ratio", 5, Align::kRight}};
  all.insert(all.end(), of_adapters.begin(), of_adapters.end());
  return all;
}

const PlanRung& rung_of(const Plan& plan, int64_t tokens) {
  for (const PlanRung& rung : plan.ladder) {
    if (tokens <= rung.last_tokens) return rung;
  }
  return plan.ladder.back();
}

std::vector<Cell> cells(const DeviceBenchOptions& options, const NamedShape& shape,
                        const RankTeam& team, const Plan& plan, int64_t tokens,
                        const Measurement& result) {
  const DevicePeaks peaks = peaks_of(plan, team.size());
  // Tensor cores take two products of bytes in the time of one of 16 bits.
  const bool in_bytes = shape.spec.quant.activations != ActivationScale::kNone;
  const double rate = peaks.operations_per_second * (in_bytes ? 2 : 1);
  const double floor_us =
      std::max(result.weight_bytes / peaks.bytes_per_second, result.flops / rate) * 1e6;
  const double us = result.timing.mean_ms * 1e3;
  const double std_us = result.timing.std_ms * 1e3;
  const PlanRung& rung = rung_of(plan, tokens);
  std::vector<Cell> all = {text_cell(shape.name),
                           integer_cell(tokens),
                           text_cell(std::string(to_string(shape.spec.weight_dtype))),
                           text_cell(options.routing),
                           {nullptr, fmt::format("{:.1f} ± {:.1f}", us, std_us)},
                           fixed_cell(us, 2),
                           fixed_cell(std_us, 2),
                           fixed_cell(result.timing.min_ms * 1e3, 1),
                           fixed_cell(result.experts_hit, 1),
                           fixed_cell(static_cast<double>(tokens * team.ep_size()) / us * 1e6, 0),
                           fixed_cell(result.flops / us * 1e-6, 1),
                           fixed_cell(result.weight_bytes / us * 1e-6, 2),
                           fixed_cell(floor_us, 1),
                           share_cell(floor_us / us),
                           text_cell(rung.kernel),
                           text_cell(rung.tile),
                           integer_cell(result.calls),
                           text_cell(build_info().commit),
                           text_cell(plan.device)};
  const AdapterLoad& adapters = options.measure.adapters;
  if (adapters.rank == 0) return all;
  const Timing& with = result.with_adapters;
  const std::vector<Cell> of_adapters = {
      integer_cell(adapters.rank),
      integer_cell(adapters.count),
      text_cell(adapted_tokens(adapters)),
      {nullptr, fmt::format("{:.1f} ± {:.1f}", with.mean_ms * 1e3, with.std_ms * 1e3)},
      fixed_cell(with.mean_ms * 1e3, 2),
      fixed_cell(with.median_ms * 1e3, 2),
      fixed_cell(with.min_ms * 1e3, 1),
      fixed_cell(result.adapter_ratio, 3)};
  all.insert(all.end(), of_adapters.begin(), of_adapters.end());
  return all;
}

}  // namespace

ExitCode run_device_bench(const RankTeam& team, const Context& context,
                          const DeviceBenchOptions& options, Console& console) {
  size_t width = 0;
  for (const NamedShape& shape : options.shapes) width = std::max(width, shape.name.size());
  TableWriter table(team.out(), parse_output_format(options.format),
                    columns(width, options.measure.adapters.rank > 0));
  const int64_t most_tokens = *std::max_element(options.tokens.begin(), options.tokens.end());
  bool header_written = false;
  for (const NamedShape& shape : options.shapes) {
    LayerOptions of_layer = layer_options(options.machine, most_tokens);
    of_layer.max_adapter_rank = options.measure.adapters.rank;
    DeviceLayers layers(team, context, shape, of_layer, options.measure, console);
    if (!header_written) {
      std::vector<std::string> lines = {
          machine_line(context) + ", " + layers.plan().device,
          fmt::format("{}: {}, {} layers; routing {}; forwards replayed in a graph", shape.name,
                      shape_text(shape.spec), layers.size(), options.routing)};
      if (!team.alone()) {
        lines.push_back("ranks: " + team.describe() + "; tokens are those of an EP rank");
      }
      if (options.measure.adapters.rank > 0) lines.push_back(describe(options.measure.adapters));
      nlohmann::ordered_json facts = nlohmann::ordered_json::object();
      add_facts(team, facts);
      table.header(facts, lines);
      header_written = true;
    }
    for (const int64_t tokens : options.tokens) {
      table.row(cells(options, shape, team, layers.plan(), tokens, layers.measure(tokens)));
    }
  }
  table.finish("results");
  return ExitCode::kOk;
}

}  // namespace conclave::tool
