// Compares the ways to split a model's layers over a cluster, by the choices of a trace: memory,
// balance, bytes that travel and predicted time. Nothing runs; equal requests give equal plans.
#pragma once

#include "plan/cluster.h"
#include "plan/hot_set.h"
#include "plan/model_layers.h"
#include "plan/strategy.h"
#include "trace/routing_trace.h"

#include "conclave/layer.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace conclave::tool {

// Whole layers over two GPUs of a node that were measured (bench/results/h200), and the largest and
// the mean relative error of a prediction against them. No share of a rate was fitted to them.
struct RankFacts {
  int calls = 0;
  double worst_error = 0;
  double mean_error = 0;
};
inline constexpr RankFacts kRankFacts{.calls = 22, .worst_error = 0.10, .mean_error = 0.032};

struct PlanRequest {
  Cluster cluster;
  // That each GPU brings to a layer, or kBatchesOfTrace.
  std::vector<int64_t> tokens = {};
  int32_t dispatch_bits = 16;  // a number in a row on its way to experts
  // How result rows come home. Sums of ranks are added up on each node once more before they cross
  // the network.
  EpCombine combine = EpCombine::kReducedPerRank;
  double reserve_bytes = 0;  // kept free on each GPU, for caches and all that is not counted
};

// Numbers of some batches of all layers.
struct Spread {
  double mean = 0;
  double p50 = 0;
  double p95 = 0;
  double worst = 0;
};

struct StrategyPlan {
  Strategy strategy;
  int64_t tokens = 0;          // that a GPU brings
  int32_t slots_per_rank = 0;  // the most that a rank holds
  // Bytes of a rank, all layers.
  double weight_bytes = 0;
  double workspace_bytes = 0;
  double memory_bytes = 0;        // both, what is beside the layers, and the reserve
  std::string does_not_fit = {};  // why; empty if it fits
  // The mean over ranks of the rows of each over the largest: 1 is perfect.
  Spread balance = {};
  // Bytes of a GPU in one layer: the mean over GPUs, within its node and over the network.
  double dispatch_bytes = 0;
  double combine_bytes = 0;
  double network_bytes = 0;  // the part of both that crosses the network
  // Microseconds of a layer, one step after the other.
  double compute_us = 0;  // what the busiest rank takes
  double exchange_us = 0;
  Spread layer_us = {};
  double tokens_per_second = 0;  // that a GPU gets through one layer

  bool fits() const { return does_not_fit.empty(); }
};

// Rows of ranks of one layer over their mean; neighbouring ranks share a field where there are
// many.
struct RankLoads {
  std::string strategy = {};
  std::vector<std::vector<double>> of_layer = {};  // [layers][fields]
  int32_t ranks = 0;
};

struct ClusterPlan {
  PlanRequest request;
  std::string trace_text;
  TraceInfo trace;
  std::vector<StrategyPlan> rows = {};  // for each number of tokens, the fastest first
  HotSet hot_set = {};
  // Rows of each expert over the mean of its layer, [layers][E].
  std::vector<std::vector<double>> expert_loads = {};
  RankLoads before = {};  // linear; without expert parallelism there is neither
  RankLoads after = {};   // the best balanced strategy of the same ranks
  // Points into rows, or -1: what has the least time for the fewest tokens, and the most tokens in
  // a second for any.
  int64_t best_latency = -1;
  int64_t best_throughput = -1;
};

// Says how many layers are done.
using PlanProgress = std::function<void(int64_t done, int64_t all)>;

// Throws Error(kInvalidArgument) where trace and model do not fit, or the trace has no tokens,
// Error(kLayerNotFound), and what the trace throws.
ClusterPlan plan_cluster(const PlannedModel& model, const RoutingTrace& trace,
                         const PlanRequest& request, const PlanProgress& progress = {});

}  // namespace conclave::tool
