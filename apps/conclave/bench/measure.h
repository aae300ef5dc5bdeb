// Times random real-size layers in memory.
#pragma once

#include "bench/bench_adapters.h"
#include "bench/routing_ring.h"
#include "input/machine_options.h"
#include "input/shape_options.h"
#include "output/progress.h"
#include "ranks/rank_team.h"

#include "conclave/context.h"
#include "conclave/layer.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

// Bytes to read before the same weights are read again: more than any cache holds.
inline constexpr uint64_t kReuseDistanceBytes = uint64_t{1} << 30;

struct MeasureOptions {
  int32_t repetitions = 5;
  int32_t warmup = 1;         // untimed repetitions
  double min_seconds = 0.25;  // per repetition, filled with as many calls as needed
  RoutingChoice routing;
  uint64_t seed = 1;
  AdapterLoad adapters;  // with a rank every repetition is made with and without them
};

struct Timing {
  double mean_ms = 0;
  double std_ms = 0;
  double min_ms = 0;
  double median_ms = 0;
};
// `samples_ms` holds one time per repetition, each for a single call.
Timing summarise(std::vector<double> samples_ms);

struct Measurement {
  Timing timing;
  int64_t calls = 0;        // timed calls, over all repetitions
  double experts_hit = 0;   // mean per call
  double flops = 0;         // mean per call
  double weight_bytes = 0;  // mean per call
  Timing with_adapters;
  double adapter_ratio = 0;  // time with adapters over that without, the median of repetitions
};

// Several layers of one shape: as many as the reuse distance needs, but at most kMostLayers. They
// share one workspace.
class BenchLayers {
 public:
  static constexpr int64_t kMostLayers = 64;

  BenchLayers(const RankTeam& team, const Context& context, const NamedShape& shape,
              const LayerOptions& options, const AdapterLoad& adapters, uint64_t seed,
              Console& console);

  const Plan& plan() const { return layers_.front().plan(); }
  int64_t size() const { return static_cast<int64_t>(layers_.size()); }
  uint64_t weight_bytes() const;
  // Collective. Each expert-parallel rank brings `num_tokens` tokens of its own; the result is that
  // of all ranks, and the times those of the slowest.
  Measurement measure(int64_t num_tokens, const MeasureOptions& options);

 private:
  struct Inputs;
  // Milliseconds of all calls; `adapter_ids` has none, one for every token, or one for each.
  double run(const std::vector<BenchCall>& calls, Inputs& inputs,
             const std::vector<int32_t>& adapter_ids);
  int64_t count_hits(const std::vector<BenchCall>& calls, Inputs& inputs);

  const RankTeam& team_;
  const MoeSpec spec_;
  std::vector<MoeLayer> layers_;
  std::vector<Workspace> workspace_;  // one element
};

}  // namespace conclave::tool
