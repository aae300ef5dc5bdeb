#include "bench/device_bench.h"
#include "bench/device_weights.h"

#include "conclave/error.h"
#include "conclave/synthetic.h"
#include "conclave/tuning.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <vector>

namespace conclave::tool {
namespace {

using Clock = std::chrono::steady_clock;

// Keeps the routed experts alone: a table's key knows nothing else of a layer.
MoeSpec experts_alone(MoeSpec spec) {
  spec.has_gate = false;
  spec.router = {};
  spec.shared = {};
  spec.latent = {};
  spec.residual = {};
  spec.num_zero_experts = 0;
  spec.has_output_bias = false;
  return spec;
}

TuningTable load_or_empty(const std::string& path) {
  return std::filesystem::exists(path) ? TuningTable::load(path) : TuningTable();
}

// Writes beside the old file, then replaces it: a stop midway keeps the old one.
void save(const TuningTable& table, const std::string& path) {
  const std::string part = path + ".part";
  {
    std::ofstream file(part, std::ios::binary);
    file << table.to_text();
    if (!file.flush()) {
      throw Error(ErrorCode::kFileWrite, {.what = "cannot write a tuning table", .file = part});
    }
  }
  std::error_code error;
  std::filesystem::rename(part, path, error);
  if (error) {
    throw Error(ErrorCode::kFileWrite,
                {.what = "cannot write a tuning table", .file = path, .found = error.message()});
  }
}

// The most bytes of weights that `tokens` tokens can read.
int64_t active_bytes(const MoeSpec& spec, int64_t tokens) {
  const int64_t matrices = is_gated(spec.activation) ? 3 : 2;
  const int64_t expert = matrices * spec.hidden_size * spec.intermediate_size;
  const int64_t active = std::min(spec.num_experts, tokens * spec.top_k);
  return active * expert * bit_size(spec.weight_dtype) / 8;
}

int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// Times one kernel choice at a time on layers over copies of the weights. There are enough copies,
// and routings per graph, that kReuseDistanceBytes are read before a weight is read again.
class ShapeTuner {
 public:
  ShapeTuner(const Context& context, const NamedShape& shape, const MeasureOptions& measure)
      : context_(context), spec_(experts_alone(shape.spec)), measure_(measure), queue_(context) {
    constexpr int64_t kMaxCopies = 32;
    const int64_t all = active_bytes(spec_, spec_.num_experts);
    const int64_t copies = std::clamp<int64_t>(divide_up(kReuseDistanceBytes, all), 1, kMaxCopies);
    const auto source = make_synthetic_source(spec_, measure.seed);
    for (int64_t i = 0; i < copies; ++i) {
      copies_.push_back(std::make_unique<DeviceWeights>(queue_, *source));
    }
  }

  std::vector<TuningEntry> candidates(int64_t tokens) const {
    return tuning_candidates(context_, spec_, {.max_tokens = tokens}, {}, tokens);
  }

  // Microseconds per forward: the least over a few graphs.
  double time(const TuningEntry& entry) {
    auto table = std::make_shared<TuningTable>();
    table->set(entry);
    std::vector<MoeLayer> layers;
    for (const auto& weights : copies_) {
      layers.push_back(MoeLayer::create(context_, spec_, *weights,
                                        {.max_tokens = entry.tokens, .tuning = table}));
    }
    Workspace workspace(context_, layers.front().workspace_bytes());
    return time(layers, workspace, entry.tokens);
  }

 private:
  double time(const std::vector<MoeLayer>& layers, Workspace& workspace, int64_t tokens) {
    constexpr int64_t kMaxRoutings = 256;
    const int64_t round = divide_up(kReuseDistanceBytes, active_bytes(spec_, tokens));
    const int64_t num_routings = std::clamp<int64_t>(round, 4, kMaxRoutings);
    constexpr int kGraphs = 3;
    constexpr int32_t kReplays = 4;
    const DType dtype = spec_.weight_dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
    Tensor rows(dtype, {tokens, spec_.hidden_size});
    fill_random(rows.view(), measure_.seed);
    const DeviceTensor hidden = queue_.upload(rows.const_view());
    DeviceTensor out = queue_.allocate(dtype, {tokens, spec_.hidden_size});
    RoutingRing ring(spec_, 1, measure_.routing, measure_.seed);
    std::vector<DeviceTensor> routings;
    const Shape slots{tokens, spec_.top_k};
    for (int64_t i = 0; i < num_routings; ++i) {
      const BenchCall call = ring.next(tokens);
      routings.push_back(
          queue_.upload({.data = call.topk_ids.data(), .dtype = DType::kI32, .shape = slots}));
      routings.push_back(
          queue_.upload({.data = call.topk_weights.data(), .dtype = DType::kF32, .shape = slots}));
    }
    const auto enqueue = [&] {
      for (size_t i = 0; i < routings.size(); i += 2) {
        const MoeLayer& layer = layers[i / 2 % layers.size()];
        layer.forward({.hidden = hidden.const_view(),
                       .topk_ids = routings[i].const_view(),
                       .topk_weights = routings[i + 1].const_view(),
                       .out = out.view(),
                       .workspace = &workspace,
                       .stream = queue_.stream()});
      }
    };
    double best_ms = std::numeric_limits<double>::infinity();
    for (int i = 0; i < kGraphs; ++i) {
      best_ms = std::min(best_ms, queue_.time_ms(enqueue, kReplays));
    }
    return best_ms / static_cast<double>(num_routings) * 1e3;
  }

  const Context& context_;
  const MoeSpec spec_;
  const MeasureOptions measure_;
  const DeviceQueue queue_;
  std::vector<std::unique_ptr<DeviceWeights>> copies_;
};

bool is_measured(const TuningTable& table, const TuningEntry& candidate) {
  const TuningEntry* const entry = table.find(candidate.key, candidate.tokens);
  return entry != nullptr && entry->tokens == candidate.tokens;
}

}  // namespace

ExitCode run_device_tuning(const Context& context, const DeviceBenchOptions& options,
                           const TuneOptions& tune, Console& console) {
  TuningTable table = load_or_empty(tune.out);
  const auto end = Clock::now() + std::chrono::seconds(tune.budget_seconds);
  for (const NamedShape& shape : options.shapes) {
    std::unique_ptr<ShapeTuner> tuner;
    for (const int64_t tokens : options.tokens) {
      if (Clock::now() >= end) {
        fmt::print("the budget is spent; run again to go on\n");
        return ExitCode::kOk;
      }
      console.subject(fmt::format("{} T={}", shape.name, tokens));
      if (!tuner) tuner = std::make_unique<ShapeTuner>(context, shape, options.measure);
      std::vector<TuningEntry> candidates = tuner->candidates(tokens);
      if (candidates.empty() || is_measured(table, candidates.front())) continue;
      for (TuningEntry& candidate : candidates) candidate.microseconds = tuner->time(candidate);
      std::ranges::sort(candidates, {}, &TuningEntry::microseconds);
      console.clear();
      fmt::print("{} T={}:\n", shape.name, tokens);
      for (const TuningEntry& candidate : candidates) {
        fmt::print("  {:9.1f} us  {} {}\n", candidate.microseconds, candidate.kernel,
                   candidate.tile);
      }
      std::fflush(stdout);
      table.set(candidates.front());
      save(table, tune.out);
    }
  }
  return ExitCode::kOk;
}

}  // namespace conclave::tool
