#include "layer/packed_weights.h"

#include "layer/pack_mlp.h"
#include "layer/weight_parts.h"

#include "conclave/error.h"

#include <array>
#include <utility>

namespace conclave::inline v0 {
namespace {

struct LentParts {
  LentExperts experts;
  LentExperts shared;
  LentExperts residual;
};

// `weights` are not touched.
LentParts lend_parts(const LayerPlan& plan, const WeightSource& source, PackedWeights& weights) {
  LentParts parts;
  if (InPlaceParts::is(plan.in_place.routed)) {
    parts.experts =
        lend_experts(lent(routed_experts(plan, weights)), source, plan.part.local_experts);
  }
  if (plan.shared && InPlaceParts::is(plan.in_place.shared)) {
    parts.shared = lend_experts(lent(shared_experts(plan, weights)), source,
                                first_experts(plan.spec.shared.count));
  }
  if (plan.residual && InPlaceParts::is(plan.in_place.residual)) {
    parts.residual = lend_experts(lent(residual_mlp(plan, weights)), source, first_experts(1));
  }
  return parts;
}

}  // namespace

PackedWeights allocate_weights(const Context& context, const LayerPlan& plan) {
  const auto allocate = [&](const experts::ExpertsKernel* kernel, int64_t count,
                            const std::optional<Support>& in_place, ExpertSlabs& gate_up,
                            ExpertSlabs& down) {
    if (kernel == nullptr || InPlaceParts::is(in_place)) return;
    const experts::SlabBytes slab = kernel->slab_bytes();
    HostAllocator& allocator = context.host_allocator();
    gate_up = ExpertSlabs(allocator, slab.gate_up, static_cast<size_t>(count));
    down = ExpertSlabs(allocator, slab.down, static_cast<size_t>(count));
  };
  PackedWeights weights;
  const InPlaceParts& in_place = plan.in_place;
  allocate(plan.experts.get(), plan.dispatcher->num_local_experts(), in_place.routed,
           weights.gate_up, weights.down);
  allocate(plan.shared.get(), plan.spec.shared.count, in_place.shared, weights.shared_gate_up,
           weights.shared_down);
  allocate(plan.residual.get(), 1, in_place.residual, weights.residual_gate_up,
           weights.residual_down);
  return weights;
}

void check_lent(const LayerPlan& plan, const WeightSource& source, const PackedWeights& weights) {
  PackedWeights none;
  const LentParts given = lend_parts(plan, source, none);
  check_same_place(weights.lent_experts, given.experts);
  check_same_place(weights.lent_shared, given.shared);
  check_same_place(weights.lent_residual, given.residual);
}

void pack_routed_experts(const Context& context, const LayerPlan& plan, const WeightSource& source,
                         std::span<const int32_t> experts, PackedWeights& weights) {
  pack_experts(context, context.executor(), routed_experts(plan, weights), source, experts,
               scratch_bytes_of(plan));
}

void fill_weights(const Context& context, const LayerPlan& plan, const WeightSource& source,
                  std::span<const int32_t> experts, PackedWeights& weights) {
  // This comes first because it checks values: if it refuses them, nothing has been overwritten.
  RouterVectors router = read_router_vectors(plan.spec, source);
  const StaticScales routed_steps = load_steps(plan, source, WeightMlp::kRouted);
  const StaticScales shared_steps = load_steps(plan, source, WeightMlp::kShared);
  const size_t scratch_bytes = scratch_bytes_of(plan);
  Executor& executor = context.executor();
  LentParts lent = lend_parts(plan, source, weights);
  if (!InPlaceParts::is(plan.in_place.routed)) {
    pack_routed_experts(context, plan, source, experts, weights);
  }
  if (plan.shared && !InPlaceParts::is(plan.in_place.shared)) {
    pack_experts(context, executor, shared_experts(plan, weights), source,
                 first_experts(plan.spec.shared.count), scratch_bytes);
  }
  if (plan.residual && !InPlaceParts::is(plan.in_place.residual)) {
    pack_experts(context, executor, residual_mlp(plan, weights), source, first_experts(1),
                 scratch_bytes);
  }
  // All are built before any replaces an old one, so that a failed read leaves the old ones.
  const auto all = [](WeightId) { return true; };
  PackedWeights dense;
  load_dense(context, plan, source, all, dense);
  swap_dense(dense, weights, all);
  weights.lent_experts = std::move(lent.experts);
  weights.lent_shared = std::move(lent.shared);
  weights.lent_residual = std::move(lent.residual);
  weights.router = std::move(router);
  weights.static_scales = routed_steps;
  weights.shared_static_scales = shared_steps;
}

void pack_expert(const Context& context, const LayerPlan& plan, const WeightSource& source,
                 int32_t expert, const PlaceSlabs& slabs) {
  PackedWeights none;
  MlpWeights mlp = routed_experts(plan, none);
  mlp.gate_up = {&slabs.gate_up, 1};
  mlp.down = {&slabs.down, 1};
  mlp.progress_phase = {};
  CallingThread executor;
  const experts::SlabBytes bytes = plan.experts->slab_bytes();
  const std::array<int32_t, 1> experts = {expert};
  pack_experts(context, executor, mlp, source, experts, (bytes.gate_up + bytes.down) / 2);
}

}  // namespace conclave::inline v0
