#include "layer/packed_weights.h"

#include "core/checked.h"
#include "cpu/parallel.h"

#include "conclave/error.h"

#include <array>
#include <atomic>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

void check_role(const WeightSource& source, WeightRole role, int64_t count, int64_t rows,
                int64_t cols, std::initializer_list<DType> dtypes) {
  const WeightInfo info = source.describe(role);
  if (info.count == 0) {
    throw Error(ErrorCode::kTensorMissing,
                {.what = "the layer needs weights that its source lacks",
                 .tensor = std::string(to_string(role)),
                 .expected = std::to_string(count) + " x " + Shape{rows, cols}.to_string()});
  }
  if (info.count != count || info.rows != rows || info.cols != cols) {
    throw Error(
        ErrorCode::kTensorShape,
        {.what = "weights have another shape than the layer",
         .tensor = source.locate(role, 0),
         .expected = std::to_string(count) + " x " + Shape{rows, cols}.to_string(),
         .found = std::to_string(info.count) + " x " + Shape{info.rows, info.cols}.to_string()});
  }
  std::string expected;
  for (const DType dtype : dtypes) {
    if (info.dtype == dtype) return;
    expected += (expected.empty() ? "" : " or ") + std::string(to_string(dtype));
  }
  throw Error(ErrorCode::kTensorDType, {.what = "weights have another type than the layer",
                                        .tensor = source.locate(role, 0),
                                        .expected = expected,
                                        .found = std::string(to_string(info.dtype))});
}

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

struct MlpRoles {
  WeightRole gate;
  WeightRole up;
  WeightRole down;
};
constexpr MlpRoles kRouted = {WeightRole::kGate, WeightRole::kUp, WeightRole::kDown};
constexpr MlpRoles kShared = {WeightRole::kSharedGate, WeightRole::kSharedUp,
                              WeightRole::kSharedDown};

void pack_expert(const experts::ExpertsKernel& kernel, const WeightSource& source,
                 const MlpRoles& roles, int64_t source_expert, std::byte* gate_up_slab,
                 std::byte* down_slab) {
  const LoadedMatrix gate(source, roles.gate, source_expert);
  const LoadedMatrix up(source, roles.up, source_expert);
  const LoadedMatrix down(source, roles.down, source_expert);
  kernel.pack({.gate = gate.view(), .up = up.view(), .down = down.view()}, gate_up_slab, down_slab);
}

cpu::Buffer allocate_slabs(const Context& context, size_t slab_bytes, int64_t count) {
  const auto bytes = checked_mul(slab_bytes, static_cast<size_t>(count));
  if (!bytes) throw Error(ErrorCode::kSizeOverflow, "packed weights do not fit 64 bits");
  return cpu::Buffer(context.host_allocator(), *bytes);
}

}  // namespace

void check_source(const MoeSpec& spec, const WeightSource& source) {
  const int64_t experts = spec.num_experts;
  const int64_t hidden = spec.hidden_size;
  const int64_t inner = spec.intermediate_size;
  const DType dtype = spec.weight_dtype;
  const std::initializer_list<DType> any_float = {DType::kF32, DType::kF16, DType::kBF16};
  check_role(source, WeightRole::kGate, experts, inner, hidden, {dtype});
  check_role(source, WeightRole::kUp, experts, inner, hidden, {dtype});
  check_role(source, WeightRole::kDown, experts, hidden, inner, {dtype});
  if (spec.has_gate) check_role(source, WeightRole::kRouter, 1, experts, hidden, any_float);
  if (spec.shared.mode == SharedMode::kNone) return;
  const int64_t shared = spec.shared.intermediate_size;
  check_role(source, WeightRole::kSharedGate, 1, shared, hidden, {dtype});
  check_role(source, WeightRole::kSharedUp, 1, shared, hidden, {dtype});
  check_role(source, WeightRole::kSharedDown, 1, hidden, shared, {dtype});
  if (spec.shared.mode == SharedMode::kSigmoidGate) {
    check_role(source, WeightRole::kSharedExpertGate, 1, 1, hidden, any_float);
  }
}

PackedWeights allocate_weights(const Context& context, const LayerPlan& plan) {
  const int64_t local_experts = plan.dispatcher->num_local_experts();
  const experts::SlabBytes slab = plan.experts->slab_bytes();
  PackedWeights weights;
  weights.gate_up = allocate_slabs(context, slab.gate_up, local_experts);
  weights.down = allocate_slabs(context, slab.down, local_experts);
  if (plan.shared) {
    weights.shared_gate_up = allocate_slabs(context, plan.shared->slab_bytes().gate_up, 1);
    weights.shared_down = allocate_slabs(context, plan.shared->slab_bytes().down, 1);
  }
  return weights;
}

void fill_weights(const Context& context, const LayerPlan& plan,
                  std::span<const int32_t> local_experts, const WeightSource& source,
                  PackedWeights& weights) {
  const auto num_local = static_cast<int64_t>(local_experts.size());
  const experts::SlabBytes slab = plan.experts->slab_bytes();
  const auto expert_bytes = static_cast<int64_t>(slab.gate_up + slab.down);
  std::atomic<int64_t> experts_done{0};
  cpu::parallel_for_throwing(
      context.executor(), num_local, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t local = begin; local < end; ++local) {
          const auto index = static_cast<size_t>(local);
          pack_expert(*plan.experts, source, kRouted, local_experts[index],
                      weights.gate_up.data() + index * slab.gate_up,
                      weights.down.data() + index * slab.down);
          context.progress("packing experts", (experts_done.fetch_add(1) + 1) * expert_bytes,
                           num_local * expert_bytes);
        }
      });
  if (plan.shared) {
    pack_expert(*plan.shared, source, kShared, 0, weights.shared_gate_up.data(),
                weights.shared_down.data());
  }
  const auto dense = [&](WeightRole role) {
    const LoadedMatrix matrix(source, role, 0);
    return gemm::make_dense_product(matrix.view(), plan.isa, context.host_allocator());
  };
  // Both are built before either is replaced: a failed read leaves the old ones in place.
  auto gate = plan.spec.has_gate ? dense(WeightRole::kRouter) : nullptr;
  auto shared_gate = plan.spec.shared.mode == SharedMode::kSigmoidGate
                         ? dense(WeightRole::kSharedExpertGate)
                         : nullptr;
  weights.gate = std::move(gate);
  weights.shared_gate = std::move(shared_gate);
}

}  // namespace conclave::inline v0
