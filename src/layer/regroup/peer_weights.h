// An engine does this for ranks that give each other a layer's weights: packed bytes, whatever they
// mean. Ranks of one form key have the same bytes for the same weights.
#pragma once

#include "layer/migration/move_slabs.h"

#include "conclave/error.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace conclave::inline v0 {

class Engine;
class LayerWeights;

class PeerWeights {
 public:
  virtual ~PeerWeights() = default;
  // Whether this layer's weights can be given to other ranks, or why not.
  virtual Support supported() const = 0;
  virtual int64_t form_key() const = 0;
  // Everything but routed experts, which every rank has whole: shared experts, router, projections.
  virtual std::vector<std::byte> rest(const LayerWeights& weights) const = 0;

  // Weights for this plan of those that a layer on other ranks holds, which has the same form:
  // shared or copied. `experts` has the one in each place there, -1 for none. Slabs of experts that
  // were not there are unfilled.
  virtual std::unique_ptr<LayerWeights> keep(const Engine& from, const LayerWeights& held,
                                             std::span<const int32_t> experts) const = 0;
  // Weights of which nothing is filled.
  virtual std::unique_ptr<LayerWeights> begin() const = 0;
  // Fills in what `rest` has given on another rank. Throws Error where that is something else.
  virtual void take_rest(std::span<const std::byte> bytes, LayerWeights& weights) const = 0;
  // Packs experts[i] as local expert i, and nothing where that is -1. Throws as MoeLayer::create.
  virtual void read_experts(const WeightSource& source, std::span<const int32_t> experts,
                            LayerWeights& weights) const = 0;
  // The slabs of each place, as long as the weights live.
  virtual PlaceMemory places(LayerWeights& weights) const = 0;
};

}  // namespace conclave::inline v0
