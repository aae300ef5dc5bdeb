#include "layer/packed_weights.h"

#include "core/checked.h"
#include "core/layer_roles.h"
#include "cpu/parallel.h"
#include "layer/mlp_roles.h"
#include "layer/weight_block.h"

#include "conclave/error.h"

#include <atomic>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

// Experts of one kind: where they come from, which columns of them this rank holds, where they go.
struct MlpWeights {
  const experts::ExpertsKernel& kernel;
  const MlpRoles& roles;
  TensorSlice inner;
  bool gated = true;
  bool has_bias = false;
  bool adds_down_bias = true;
  cpu::Buffer& gate_up;
  cpu::Buffer& down;
};

MlpWeights routed_experts(const LayerPlan& plan, PackedWeights& weights) {
  return {.kernel = *plan.experts,
          .roles = kRoutedRoles,
          .inner = plan.part.inner,
          .gated = is_gated(plan.spec.activation),
          .has_bias = plan.spec.has_bias,
          .adds_down_bias = plan.part.adds_down_bias,
          .gate_up = weights.gate_up,
          .down = weights.down};
}

MlpWeights shared_experts(const LayerPlan& plan, PackedWeights& weights) {
  return {.kernel = *plan.shared,
          .roles = kSharedRoles,
          .inner = plan.part.shared_inner,
          .gated = is_gated(activation_or_routed(plan.spec.shared.activation, plan.spec)),
          .has_bias = plan.spec.shared.has_bias,
          .adds_down_bias = plan.part.adds_down_bias,
          .gate_up = weights.shared_gate_up,
          .down = weights.shared_down};
}

MlpWeights residual_mlp(const LayerPlan& plan, PackedWeights& weights) {
  return {.kernel = *plan.residual,
          .roles = kResidualRoles,
          .inner = plan.part.residual_inner,
          .gated = is_gated(activation_or_routed(plan.spec.residual.activation, plan.spec)),
          .gate_up = weights.residual_gate_up,
          .down = weights.residual_down};
}

// Reads this rank's slice of source expert `expert` and packs it as local expert `local`.
void pack_expert(const MlpWeights& mlp, const WeightSource& source, int64_t expert, size_t local) {
  const WeightInfo down_info = source.describe(mlp.roles.down);
  const int64_t hidden = down_info.rows;
  const TensorSlice inner = mlp.inner;
  const auto rows = [&](WeightRole role) {
    return LoadedBlock(source, role, expert, {inner.begin, inner.end, 0, hidden});
  };
  const auto inner_bias = [&](WeightRole role) {
    return LoadedBlock(source, role, expert, {0, 1, inner.begin, inner.end});
  };
  const LoadedBlock gate = mlp.gated ? rows(mlp.roles.gate) : LoadedBlock();
  const LoadedBlock up = rows(mlp.roles.up);
  const LoadedBlock down(source, mlp.roles.down, expert, {0, hidden, inner.begin, inner.end});
  LoadedBlock gate_bias;
  LoadedBlock up_bias;
  LoadedBlock down_bias;
  if (mlp.has_bias) {
    if (mlp.gated) gate_bias = inner_bias(mlp.roles.gate_bias);
    up_bias = inner_bias(mlp.roles.up_bias);
    if (mlp.adds_down_bias) {
      down_bias = LoadedBlock(source, mlp.roles.down_bias, expert, {0, 1, 0, hidden});
    }
  }
  const experts::SlabBytes slab = mlp.kernel.slab_bytes();
  mlp.kernel.pack({.gate = gate.view(),
                   .up = up.view(),
                   .down = down.view(),
                   .gate_bias = gate_bias.view(),
                   .up_bias = up_bias.view(),
                   .down_bias = down_bias.view()},
                  mlp.gate_up.data() + local * slab.gate_up, mlp.down.data() + local * slab.down);
}

cpu::Buffer allocate_slabs(const Context& context, size_t slab_bytes, int64_t count) {
  const auto bytes = checked_mul(slab_bytes, static_cast<size_t>(count));
  if (!bytes) throw Error(ErrorCode::kSizeOverflow, "packed weights do not fit 64 bits");
  return cpu::Buffer(context.host_allocator(), *bytes);
}

// The dense products and vectors. All are built before any is replaced: a failed read leaves the
// old ones in place.
struct DenseWeights {
  std::unique_ptr<gemm::DenseProduct> gate, shared_gate, mix_gate, latent_down, latent_up;
  std::vector<float> mix_gate_bias, latent_norm, output_bias;
};

DenseWeights load_dense(const Context& context, const LayerPlan& plan, const WeightSource& source) {
  const MoeSpec& spec = plan.spec;
  const auto product = [&](bool wanted, WeightRole role) -> std::unique_ptr<gemm::DenseProduct> {
    if (!wanted) return nullptr;
    const LoadedBlock matrix(source, role, 0, whole_block(source.describe(role)));
    return gemm::make_dense_product(matrix.view(), plan.isa, context.host_allocator());
  };
  const auto vector = [&](bool wanted, WeightRole role) -> std::vector<float> {
    if (!wanted) return {};
    return load_vector(source, role);
  };
  const bool has_latent = spec.latent.size != 0;
  const bool mixes = spec.shared.mode == SharedMode::kSoftmaxMix;
  const bool has_mix_bias = mixes && source.describe(WeightRole::kMixGateBias).count != 0;
  const bool has_shared_gate = plan.shared && spec.shared.mode == SharedMode::kSigmoidGate;
  return {.gate = product(spec.has_gate, WeightRole::kRouter),
          .shared_gate = product(has_shared_gate, WeightRole::kSharedExpertGate),
          .mix_gate = product(mixes, WeightRole::kMixGate),
          .latent_down = product(has_latent, WeightRole::kLatentDown),
          .latent_up = product(has_latent, WeightRole::kLatentUp),
          .mix_gate_bias = vector(has_mix_bias, WeightRole::kMixGateBias),
          .latent_norm = vector(has_latent && spec.latent.has_norm, WeightRole::kLatentNorm),
          .output_bias = vector(spec.has_output_bias, WeightRole::kOutputBias)};
}

}  // namespace

PackedWeights allocate_weights(const Context& context, const LayerPlan& plan) {
  const auto allocate = [&](const experts::ExpertsKernel* kernel, int64_t count,
                            cpu::Buffer& gate_up, cpu::Buffer& down) {
    if (kernel == nullptr) return;
    const experts::SlabBytes slab = kernel->slab_bytes();
    gate_up = allocate_slabs(context, slab.gate_up, count);
    down = allocate_slabs(context, slab.down, count);
  };
  PackedWeights weights;
  allocate(plan.experts.get(), plan.dispatcher->num_local_experts(), weights.gate_up, weights.down);
  allocate(plan.shared.get(), plan.spec.shared.count, weights.shared_gate_up, weights.shared_down);
  allocate(plan.residual.get(), 1, weights.residual_gate_up, weights.residual_down);
  return weights;
}

void fill_weights(const Context& context, const LayerPlan& plan, const WeightSource& source,
                  PackedWeights& weights) {
  const std::vector<int32_t>& local_experts = plan.part.local_experts;
  const auto num_local = static_cast<int64_t>(local_experts.size());
  const MlpWeights routed = routed_experts(plan, weights);
  const experts::SlabBytes slab = routed.kernel.slab_bytes();
  const auto expert_bytes = static_cast<int64_t>(slab.gate_up + slab.down);
  std::atomic<int64_t> experts_done{0};
  cpu::parallel_for_throwing(
      context.executor(), num_local, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t local = begin; local < end; ++local) {
          const auto index = static_cast<size_t>(local);
          pack_expert(routed, source, local_experts[index], index);
          context.progress("packing experts", (experts_done.fetch_add(1) + 1) * expert_bytes,
                           num_local * expert_bytes);
        }
      });
  if (plan.shared) {
    const MlpWeights shared = shared_experts(plan, weights);
    for (int64_t expert = 0; expert < plan.spec.shared.count; ++expert) {
      pack_expert(shared, source, expert, static_cast<size_t>(expert));
    }
  }
  if (plan.residual) pack_expert(residual_mlp(plan, weights), source, 0, 0);
  DenseWeights dense = load_dense(context, plan, source);
  weights.gate = std::move(dense.gate);
  weights.shared_gate = std::move(dense.shared_gate);
  weights.mix_gate = std::move(dense.mix_gate);
  weights.latent_down = std::move(dense.latent_down);
  weights.latent_up = std::move(dense.latent_up);
  weights.mix_gate_bias = std::move(dense.mix_gate_bias);
  weights.latent_norm = std::move(dense.latent_norm);
  weights.output_bias = std::move(dense.output_bias);
}

}  // namespace conclave::inline v0
