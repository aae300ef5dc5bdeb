// The parts of a layer's packed weights, as packing takes them: MLPs by kind, and what the layer
// has beside them.
#pragma once

#include "layer/lent_experts.h"
#include "layer/pack_mlp.h"
#include "layer/packed_weights.h"
#include "layer/plan.h"

#include "conclave/context.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// `weights` must outlive what they return. The plan must have the MLP.
MlpWeights routed_experts(const LayerPlan& plan, const PackedWeights& weights);
MlpWeights shared_experts(const LayerPlan& plan, const PackedWeights& weights);
MlpWeights residual_mlp(const LayerPlan& plan, const PackedWeights& weights);
LentMlp lent(const MlpWeights& mlp);
std::vector<int32_t> first_experts(int64_t count);
// For pack_experts. fill_weights promises copies of at most a tenth and one expert. Packing takes a
// sixteenth and half an expert; the rest is left for pages, stacks and small weights.
size_t scratch_bytes_of(const LayerPlan& plan);

// The dense products of the layer itself and its vectors but for the router's: those that are
// wanted and that the plan has. After an error `to` may have some of them.
void load_dense(const Context& context, const LayerPlan& plan, const WeightSource& source,
                const WantedWeights& wants, PackedWeights& to);
// Exchanges those that are wanted.
void swap_dense(PackedWeights& a, PackedWeights& b, const WantedWeights& wants) noexcept;
// The rank's steps of rows: the largest of all experts in the source.
StaticScales load_steps(const LayerPlan& plan, const WeightSource& source, WeightMlp mlp);

// Packs on the thread that calls, without the context's, which forwards may be using.
class CallingThread final : public Executor {
 public:
  int32_t concurrency() const noexcept override { return 1; }
  void run(ParallelTask task) override { task.invoke(task.state, 0); }
};

}  // namespace conclave::inline v0
