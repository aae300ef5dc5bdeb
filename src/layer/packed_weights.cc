#include "layer/packed_weights.h"

#include "core/checked.h"
#include "core/layer_roles.h"
#include "cpu/parallel.h"

#include "conclave/error.h"

#include <atomic>
#include <optional>
#include <utility>

namespace conclave::inline v0 {
namespace {

// One matrix in memory: the source's own where it offers one, else a copy that lives here.
class LoadedMatrix {
 public:
  LoadedMatrix(const WeightSource& source, WeightRole role, int64_t expert)
      : view_(source.view(role, expert)) {
    if (!view_.empty()) return;
    const WeightInfo info = source.describe(role);
    copy_ = Tensor(info.dtype, {info.rows, info.cols});
    source.read(role, expert,
                {.row_begin = 0, .row_end = info.rows, .col_begin = 0, .col_end = info.cols},
                {copy_.as<std::byte>(), copy_.size_bytes()});
    view_ = copy_.const_view();
  }
  LoadedMatrix(const LoadedMatrix&) = delete;
  LoadedMatrix& operator=(const LoadedMatrix&) = delete;

  const ConstTensorView& view() const { return view_; }

 private:
  Tensor copy_;
  ConstTensorView view_;
};

// A role that the source may not have.
class OptionalMatrix {
 public:
  OptionalMatrix(const WeightSource& source, WeightRole role, int64_t expert, bool wanted) {
    if (wanted) matrix_.emplace(source, role, expert);
  }
  ConstTensorView view() const { return matrix_ ? matrix_->view() : ConstTensorView{}; }

 private:
  std::optional<LoadedMatrix> matrix_;
};

struct MlpRoles {
  WeightRole gate;
  WeightRole up;
  WeightRole down;
  WeightRole gate_bias;
  WeightRole up_bias;
  WeightRole down_bias;
};
constexpr MlpRoles kRouted = {WeightRole::kGate,     WeightRole::kUp,     WeightRole::kDown,
                              WeightRole::kGateBias, WeightRole::kUpBias, WeightRole::kDownBias};
constexpr MlpRoles kShared = {WeightRole::kSharedGate,   WeightRole::kSharedUp,
                              WeightRole::kSharedDown,   WeightRole::kSharedGateBias,
                              WeightRole::kSharedUpBias, WeightRole::kSharedDownBias};
// Without biases: those of the routed experts stand for none.
constexpr MlpRoles kResidual = {WeightRole::kResidualGate, WeightRole::kResidualUp,
                                WeightRole::kResidualDown, WeightRole::kGateBias,
                                WeightRole::kUpBias,       WeightRole::kDownBias};

// One kind of MLP: which roles it reads, and which of them there are.
struct MlpKind {
  const experts::ExpertsKernel& kernel;
  MlpRoles roles;
  bool gated = true;
  bool has_bias = false;
};

void pack_expert(const MlpKind& kind, const WeightSource& source, int64_t source_expert,
                 std::byte* gate_up_slab, std::byte* down_slab) {
  const auto load = [&](WeightRole role, bool wanted) {
    return OptionalMatrix(source, role, source_expert, wanted);
  };
  const OptionalMatrix gate = load(kind.roles.gate, kind.gated);
  const OptionalMatrix up = load(kind.roles.up, true);
  const OptionalMatrix down = load(kind.roles.down, true);
  const OptionalMatrix gate_bias = load(kind.roles.gate_bias, kind.gated && kind.has_bias);
  const OptionalMatrix up_bias = load(kind.roles.up_bias, kind.has_bias);
  const OptionalMatrix down_bias = load(kind.roles.down_bias, kind.has_bias);
  kind.kernel.pack({.gate = gate.view(),
                    .up = up.view(),
                    .down = down.view(),
                    .gate_bias = gate_bias.view(),
                    .up_bias = up_bias.view(),
                    .down_bias = down_bias.view()},
                   gate_up_slab, down_slab);
}

MlpKind routed_kind(const LayerPlan& plan) {
  return {.kernel = *plan.experts,
          .roles = kRouted,
          .gated = is_gated(plan.spec.activation),
          .has_bias = plan.spec.has_bias};
}

// Shared experts and the residual MLP: few, packed one after another.
void fill_dense_mlps(const LayerPlan& plan, const WeightSource& source, PackedWeights& weights) {
  const MoeSpec& spec = plan.spec;
  if (plan.shared) {
    const MlpKind kind{.kernel = *plan.shared,
                       .roles = kShared,
                       .gated = is_gated(activation_or_routed(spec.shared.activation, spec)),
                       .has_bias = spec.shared.has_bias};
    const experts::SlabBytes slab = plan.shared->slab_bytes();
    for (int64_t expert = 0; expert < spec.shared.count; ++expert) {
      const auto index = static_cast<size_t>(expert);
      pack_expert(kind, source, expert, weights.shared_gate_up.data() + index * slab.gate_up,
                  weights.shared_down.data() + index * slab.down);
    }
  }
  if (plan.residual) {
    const MlpKind kind{.kernel = *plan.residual,
                       .roles = kResidual,
                       .gated = is_gated(activation_or_routed(spec.residual.activation, spec))};
    pack_expert(kind, source, 0, weights.residual_gate_up.data(), weights.residual_down.data());
  }
}

// One row of any float type, widened.
std::vector<float> load_vector(const WeightSource& source, WeightRole role) {
  const LoadedMatrix matrix(source, role, 0);
  std::vector<float> values(static_cast<size_t>(matrix.view().shape[1]));
  convert(matrix.view(),
          {.data = values.data(), .dtype = DType::kF32, .shape = matrix.view().shape});
  return values;
}

// The small weights, built whole before any of them is replaced: a failed read leaves the old ones.
struct DenseWeights {
  std::unique_ptr<gemm::DenseProduct> gate, shared_gate, mix_gate, latent_down, latent_up;
  std::vector<float> mix_gate_bias, latent_norm, output_bias;
};

DenseWeights load_dense(const Context& context, const LayerPlan& plan, const WeightSource& source) {
  const MoeSpec& spec = plan.spec;
  const auto product = [&](WeightRole role, bool wanted) -> std::unique_ptr<gemm::DenseProduct> {
    if (!wanted) return nullptr;
    const LoadedMatrix matrix(source, role, 0);
    return gemm::make_dense_product(matrix.view(), plan.isa, context.host_allocator());
  };
  const auto vector = [&](WeightRole role, bool wanted) {
    return wanted ? load_vector(source, role) : std::vector<float>();
  };
  const bool softmax_mix = spec.shared.mode == SharedMode::kSoftmaxMix;
  const bool latent = spec.latent.size != 0;
  const bool mix_bias = softmax_mix && source.describe(WeightRole::kMixGateBias).count != 0;
  return {.gate = product(WeightRole::kRouter, spec.has_gate),
          .shared_gate =
              product(WeightRole::kSharedExpertGate, spec.shared.mode == SharedMode::kSigmoidGate),
          .mix_gate = product(WeightRole::kMixGate, softmax_mix),
          .latent_down = product(WeightRole::kLatentDown, latent),
          .latent_up = product(WeightRole::kLatentUp, latent),
          .mix_gate_bias = vector(WeightRole::kMixGateBias, mix_bias),
          .latent_norm = vector(WeightRole::kLatentNorm, spec.latent.has_norm),
          .output_bias = vector(WeightRole::kOutputBias, spec.has_output_bias)};
}

cpu::Buffer allocate_slabs(const Context& context, size_t slab_bytes, int64_t count) {
  const auto bytes = checked_mul(slab_bytes, static_cast<size_t>(count));
  if (!bytes) throw Error(ErrorCode::kSizeOverflow, "packed weights do not fit 64 bits");
  return cpu::Buffer(context.host_allocator(), *bytes);
}

}  // namespace

PackedWeights allocate_weights(const Context& context, const LayerPlan& plan) {
  const int64_t local_experts = plan.dispatcher->num_local_experts();
  const experts::SlabBytes slab = plan.experts->slab_bytes();
  PackedWeights weights;
  weights.gate_up = allocate_slabs(context, slab.gate_up, local_experts);
  weights.down = allocate_slabs(context, slab.down, local_experts);
  if (plan.shared) {
    const int64_t count = plan.spec.shared.count;
    weights.shared_gate_up = allocate_slabs(context, plan.shared->slab_bytes().gate_up, count);
    weights.shared_down = allocate_slabs(context, plan.shared->slab_bytes().down, count);
  }
  if (plan.residual) {
    weights.residual_gate_up = allocate_slabs(context, plan.residual->slab_bytes().gate_up, 1);
    weights.residual_down = allocate_slabs(context, plan.residual->slab_bytes().down, 1);
  }
  return weights;
}

void fill_weights(const Context& context, const LayerPlan& plan,
                  std::span<const int32_t> local_experts, const WeightSource& source,
                  PackedWeights& weights) {
  const auto num_local = static_cast<int64_t>(local_experts.size());
  const experts::SlabBytes slab = plan.experts->slab_bytes();
  const auto expert_bytes = static_cast<int64_t>(slab.gate_up + slab.down);
  const MlpKind kind = routed_kind(plan);
  std::atomic<int64_t> experts_done{0};
  cpu::parallel_for_throwing(
      context.executor(), num_local, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t local = begin; local < end; ++local) {
          const auto index = static_cast<size_t>(local);
          pack_expert(kind, source, local_experts[index],
                      weights.gate_up.data() + index * slab.gate_up,
                      weights.down.data() + index * slab.down);
          context.progress("packing experts", (experts_done.fetch_add(1) + 1) * expert_bytes,
                           num_local * expert_bytes);
        }
      });
  fill_dense_mlps(plan, source, weights);
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
