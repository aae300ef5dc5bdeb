#include "layer/weight_parts.h"

#include "core/part_spec.h"
#include "core/quant_spec.h"
#include "core/row_stride.h"
#include "core/shared_facts.h"
#include "core/weight_types.h"
#include "layer/gate_values.h"
#include "quant/weight_block.h"

// Inlined, so that an installed package does not depend on the library.
#define XXH_INLINE_ALL
#include <array>
#include <memory>
#include <numeric>
#include <utility>
#include <xxhash.h>

namespace conclave::inline v0 {
namespace {

const QuantSpec* quant_of(const LayerPlan& plan, DType dtype) {
  return is_plain(dtype) ? nullptr : &plan.spec.quant;
}

// The rows of the matrix may lie apart.
uint64_t hash_of(const ConstTensorView& matrix) {
  const auto row_bytes = static_cast<size_t>(packed_bytes(matrix.dtype, matrix.shape[1]));
  const int64_t stride = row_stride(matrix);
  const auto* row = static_cast<const std::byte*>(matrix.data);
  uint64_t hash = static_cast<uint64_t>(matrix.dtype);
  for (int64_t i = 0; i < matrix.shape[0]; ++i) {
    hash = XXH3_64bits_withSeed(row, row_bytes, hash);
    row += packed_bytes(matrix.dtype, stride);
  }
  return hash;
}

struct DenseWeight {
  WeightId id;
  std::unique_ptr<gemm::DenseProduct> PackedWeights::*product = nullptr;
  std::vector<float> PackedWeights::*vector = nullptr;
};

constexpr std::array kDenseWeights = {
    DenseWeight{.id = weights::kRouter, .product = &PackedWeights::gate},
    DenseWeight{.id = weights::kSharedExpertGate, .product = &PackedWeights::shared_gate},
    DenseWeight{.id = weights::kMixGate, .product = &PackedWeights::mix_gate},
    DenseWeight{.id = weights::kLatentDown, .product = &PackedWeights::latent_down},
    DenseWeight{.id = weights::kLatentUp, .product = &PackedWeights::latent_up},
    DenseWeight{.id = weights::kMixGateBias, .vector = &PackedWeights::mix_gate_bias},
    DenseWeight{.id = weights::kLatentNorm, .vector = &PackedWeights::latent_norm},
    DenseWeight{.id = weights::kOutputBias, .vector = &PackedWeights::output_bias}};

// Whether the plan reads it.
bool is_read(const LayerPlan& plan, const WeightSource& source, WeightId id) {
  const MoeSpec& spec = plan.spec;
  const bool mixes = shared_facts(spec).has_mix_gate();
  switch (*id.layer()) {
    case LayerWeight::kRouter:
      return spec.has_gate;
    case LayerWeight::kSharedExpertGate:
      return plan.shared && shared_facts(spec).has_sigmoid_gate();
    case LayerWeight::kMixGate:
      return mixes;
    case LayerWeight::kMixGateBias:
      return mixes && source.describe(id).count != 0;
    case LayerWeight::kLatentNorm:
      return spec.latent.size != 0 && spec.latent.has_norm;
    case LayerWeight::kOutputBias:
      return spec.has_output_bias;
    default:
      return spec.latent.size != 0;
  }
}

}  // namespace

MlpWeights routed_experts(const LayerPlan& plan, const PackedWeights& weights) {
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

MlpWeights shared_experts(const LayerPlan& plan, const PackedWeights& weights) {
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

MlpWeights residual_mlp(const LayerPlan& plan, const PackedWeights& weights) {
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

size_t scratch_bytes_of(const LayerPlan& plan) {
  const experts::SlabBytes slab = plan.experts->slab_bytes();
  return plan.summary.packed_bytes / 16 + (slab.gate_up + slab.down) / 2;
}

void load_dense(const Context& context, const LayerPlan& plan, const WeightSource& source,
                const WantedWeights& wants, PackedWeights& to) {
  BlockLoader loader(source);
  for (const DenseWeight& one : kDenseWeights) {
    if (!wants(one.id)) continue;
    const bool is_there = is_read(plan, source, one.id);
    if (one.vector != nullptr) {
      to.*one.vector = is_there ? load_vector(source, one.id) : std::vector<float>();
    } else if (is_there) {
      const ConstTensorView matrix = loader.load(one.id, 0);
      if (one.id == weights::kRouter) to.gate_rows_with_nan = count_nan_rows(context, matrix);
      to.*one.product = gemm::make_dense_product(matrix, plan.isa, context.host_allocator());
      to.stored_hashes[one.id] = hash_of(matrix);
    }
  }
}

void swap_dense(PackedWeights& a, PackedWeights& b, const WantedWeights& wants) noexcept {
  for (const DenseWeight& one : kDenseWeights) {
    if (!wants(one.id)) continue;
    if (one.vector != nullptr) std::swap(a.*one.vector, b.*one.vector);
    if (one.product == nullptr) continue;
    std::swap(a.*one.product, b.*one.product);
    std::swap(a.stored_hashes[one.id], b.stored_hashes[one.id]);
    if (one.id == weights::kRouter) std::swap(a.gate_rows_with_nan, b.gate_rows_with_nan);
  }
}

StaticScales load_steps(const LayerPlan& plan, const WeightSource& source, WeightMlp mlp) {
  const bool is_shared = mlp == WeightMlp::kShared;
  if (!has_input_scale(plan.spec.quant)) return {};
  if (is_shared && (plan.shared == nullptr || is_plain(shared_weight_dtype(plan.spec)))) return {};
  return load_static_scales(source, mlp);
}

}  // namespace conclave::inline v0
