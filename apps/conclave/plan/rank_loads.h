// Divides one batch of a layer by one strategy: rows of ranks, and times.
#pragma once

#include "plan/layer_load.h"
#include "plan/model_layers.h"
#include "plan/planner.h"

#include <cstdint>
#include <vector>

namespace conclave::tool {

// A strategy on one layer.
struct PlacedLayer {
  const Strategy& strategy;
  const ModelLayer& layer;
  LayerSizes sizes;
  ExpertSlots slots;
  LayerLoad::Copies copies;
};
PlacedLayer place_layer(const Strategy& strategy, const Cluster& cluster, const ModelLayer& layer,
                        const LayerLoad& load);

struct BatchTimes {
  double balance = 1;  // mean rows of ranks over the largest
  double compute_us = 0;
  double exchange_us = 0;
  double most_rows = 0;  // the busiest rank's
  std::vector<double> rank_rows;

  double layer_us() const { return compute_us + exchange_us; }
};
// A batch of a group, to which each GPU brings an equal part.
BatchTimes batch_times(const PlacedLayer& placed, const PlanRequest& request,
                       const LoadBatch& batch);

// Bytes of the mean GPU of a group, out and home. `tokens` are those that each GPU brings.
struct TravelBytes {
  RowExchange dispatch;
  RowExchange combine;
};
TravelBytes travel_bytes(const PlacedLayer& placed, const PlanRequest& request, double tokens);

}  // namespace conclave::tool
