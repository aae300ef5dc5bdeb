#include "layer/packed_weights.h"

#include "core/part_spec.h"
#include "core/quant_spec.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"
#include "layer/pack_mlp.h"
#include "quant/weight_block.h"

#include "conclave/error.h"

#include <array>
#include <numeric>
#include <utility>

namespace conclave::inline v0 {
namespace {

const QuantSpec* quant_of(const LayerPlan& plan, DType dtype) {
  return is_plain(dtype) ? nullptr : &plan.spec.quant;
}

MlpWeights routed_experts(const LayerPlan& plan, PackedWeights& weights) {
  return {.kernel = *plan.experts,
          .mlp = WeightMlp::kRouted,
          .inner = plan.part.inner,
          .gated = is_gated(plan.spec.activation),
          .has_bias = plan.spec.has_bias,
          .adds_down_bias = plan.part.adds_down_bias,
          .quant = quant_of(plan, plan.spec.weight_dtype),
          .gate_up = weights.gate_up.each(),
          .down = weights.down.each(),
          .progress_phase = "packing experts"};
}

MlpWeights shared_experts(const LayerPlan& plan, PackedWeights& weights) {
  return {.kernel = *plan.shared,
          .mlp = WeightMlp::kShared,
          .inner = plan.part.shared_inner,
          .gated = is_gated(activation_or_routed(plan.spec.shared.activation, plan.spec)),
          .has_bias = plan.spec.shared.has_bias,
          .adds_down_bias = plan.part.adds_down_bias,
          .quant = quant_of(plan, shared_weight_dtype(plan.spec)),
          .gate_up = weights.shared_gate_up.each(),
          .down = weights.shared_down.each()};
}

MlpWeights residual_mlp(const LayerPlan& plan, PackedWeights& weights) {
  return {.kernel = *plan.residual,
          .mlp = WeightMlp::kResidual,
          .inner = plan.part.residual_inner,
          .gated = is_gated(activation_or_routed(plan.spec.residual.activation, plan.spec)),
          .gate_up = weights.residual_gate_up.each(),
          .down = weights.residual_down.each()};
}

LentMlp lent(const MlpWeights& mlp) {
  return {.mlp = mlp.mlp,
          .inner = mlp.inner,
          .gated = mlp.gated,
          .has_bias = mlp.has_bias,
          .adds_down_bias = mlp.adds_down_bias};
}

std::vector<int32_t> first_experts(int64_t count) {
  std::vector<int32_t> experts(static_cast<size_t>(count));
  std::iota(experts.begin(), experts.end(), 0);
  return experts;
}

// Packs without the context's threads, which forwards may be using.
class CallingThread final : public Executor {
 public:
  int32_t concurrency() const noexcept override { return 1; }
  void run(ParallelTask task) override { task.invoke(task.state, 0); }
};

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

// The dense products and vectors. All are built before any replaces an old one, so that a failed
// read leaves the old ones in place.
struct DenseWeights {
  std::unique_ptr<gemm::DenseProduct> gate, shared_gate, mix_gate, latent_down, latent_up;
  std::vector<float> mix_gate_bias, latent_norm, output_bias;
};

DenseWeights load_dense(const Context& context, const LayerPlan& plan, const WeightSource& source) {
  const MoeSpec& spec = plan.spec;
  BlockLoader loader(source);
  const auto product = [&](bool wanted, WeightId id) -> std::unique_ptr<gemm::DenseProduct> {
    if (!wanted) return nullptr;
    return gemm::make_dense_product(loader.load(id, 0), plan.isa, context.host_allocator());
  };
  const auto vector = [&](bool wanted, WeightId id) -> std::vector<float> {
    if (!wanted) return {};
    return load_vector(source, id);
  };
  const bool has_latent = spec.latent.size != 0;
  const bool mixes = shared_facts(spec).has_mix_gate();
  const bool has_mix_bias = mixes && source.describe(weights::kMixGateBias).count != 0;
  const bool has_shared_gate = plan.shared && shared_facts(spec).has_sigmoid_gate();
  return {.gate = product(spec.has_gate, weights::kRouter),
          .shared_gate = product(has_shared_gate, weights::kSharedExpertGate),
          .mix_gate = product(mixes, weights::kMixGate),
          .latent_down = product(has_latent, weights::kLatentDown),
          .latent_up = product(has_latent, weights::kLatentUp),
          .mix_gate_bias = vector(has_mix_bias, weights::kMixGateBias),
          .latent_norm = vector(has_latent && spec.latent.has_norm, weights::kLatentNorm),
          .output_bias = vector(spec.has_output_bias, weights::kOutputBias)};
}

// fill_weights promises copies of at most a tenth and one expert. Packing takes a sixteenth and
// half an expert; the rest is left for pages, stacks and small weights.
size_t scratch_bytes_of(const LayerPlan& plan) {
  const experts::SlabBytes slab = plan.experts->slab_bytes();
  return plan.summary.packed_bytes / 16 + (slab.gate_up + slab.down) / 2;
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
  const auto static_scales = [&](bool there, WeightMlp mlp) {
    return there && has_input_scale(plan.spec.quant) ? load_static_scales(source, mlp)
                                                     : StaticScales{};
  };
  const StaticScales routed_scales = static_scales(true, WeightMlp::kRouted);
  const bool shared_quantised = !is_plain(shared_weight_dtype(plan.spec));
  const StaticScales shared_scales =
      static_scales(plan.shared != nullptr && shared_quantised, WeightMlp::kShared);
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
  weights.lent_experts = std::move(lent.experts);
  weights.lent_shared = std::move(lent.shared);
  weights.lent_residual = std::move(lent.residual);
  DenseWeights dense = load_dense(context, plan, source);
  weights.gate = std::move(dense.gate);
  weights.shared_gate = std::move(dense.shared_gate);
  weights.mix_gate = std::move(dense.mix_gate);
  weights.latent_down = std::move(dense.latent_down);
  weights.latent_up = std::move(dense.latent_up);
  weights.mix_gate_bias = std::move(dense.mix_gate_bias);
  weights.latent_norm = std::move(dense.latent_norm);
  weights.output_bias = std::move(dense.output_bias);
  weights.router = std::move(router);
  weights.static_scales = routed_scales;
  weights.shared_static_scales = shared_scales;
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
