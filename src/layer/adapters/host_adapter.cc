#include "layer/adapters/host_adapter.h"

#include "core/part_spec.h"
#include "experts/adapters/pack.h"

#include <utility>

namespace conclave::inline v0 {
namespace {

using experts::AdapterShape;
using experts::ExpertAdapter;
using experts::MatrixFactors;

// The experts of one MLP as this rank holds them.
struct Part {
  AdapterShape shape;
  std::vector<ExpertAdapter> experts;  // by place
};

ConstTensorView rows_of(const ConstTensorView& view, const TensorSlice& slice) {
  const int64_t stride = view.row_stride != 0 ? view.row_stride : view.shape[1];
  return {.data = static_cast<const std::byte*>(view.data) +
                  slice.begin * stride * byte_size(view.dtype),
          .dtype = view.dtype,
          .shape = {slice.size(), view.shape[1]},
          .row_stride = stride};
}

ConstTensorView columns_of(const ConstTensorView& view, const TensorSlice& slice) {
  const int64_t stride = view.row_stride != 0 ? view.row_stride : view.shape[1];
  return {.data = static_cast<const std::byte*>(view.data) + slice.begin * byte_size(view.dtype),
          .dtype = view.dtype,
          .shape = {view.shape[0], slice.size()},
          .row_stride = stride};
}

// Slices of gate and up have rows of `b`, those of down columns of `a`: sums over ranks of what
// they contribute are the whole.
MatrixFactors slice_of(const LoraFactors& factors, const TensorSlice& inner) {
  MatrixFactors own{.a = factors.a, .b = factors.b, .scale = static_cast<float>(factors.scale)};
  if (factors.matrix == WeightMatrix::kDown) {
    own.a = columns_of(factors.a, inner);
  } else {
    own.b = rows_of(factors.b, inner);
  }
  return own;
}

MatrixFactors& matrix_of(ExpertAdapter& expert, WeightMatrix matrix) {
  if (matrix == WeightMatrix::kGate) return expert.gate;
  return matrix == WeightMatrix::kUp ? expert.up : expert.down;
}

// All of an adapter has one type: its own, or float32 where it has several.
DType common_dtype(const LoraAdapter& adapter) {
  const DType first = adapter.factors.front().a.dtype;
  for (const LoraFactors& factors : adapter.factors) {
    if (factors.a.dtype != first || factors.b.dtype != first) return DType::kF32;
  }
  return first;
}

Part routed_part(const LayerPlan& plan, const LoraAdapter& adapter,
                 std::span<const int32_t> places) {
  Part part{.shape = {.hidden_size = expert_width(plan.spec),
                      .intermediate_size = plan.part.inner.size(),
                      .gated = is_gated(plan.spec.activation),
                      .dtype = common_dtype(adapter)},
            .experts = std::vector<ExpertAdapter>(static_cast<size_t>(plan.part.num_places()))};
  if (plan.part.inner.size() == 0) return part;
  for (const LoraFactors& factors : adapter.factors) {
    if (factors.mlp != WeightMlp::kRouted) continue;
    // Replicas of an expert have places of their own.
    for (size_t place = 0; place < places.size(); ++place) {
      if (places[place] != factors.expert) continue;
      matrix_of(part.experts[place], factors.matrix) = slice_of(factors, plan.part.inner);
    }
  }
  return part;
}

Part shared_part(const LayerPlan& plan, const LoraAdapter& adapter) {
  const MoeSpec& spec = plan.spec;
  Part part{.shape = {.hidden_size = spec.hidden_size,
                      .intermediate_size = plan.part.shared_inner.size(),
                      .gated = is_gated(activation_or_routed(spec.shared.activation, spec)),
                      .dtype = common_dtype(adapter)},
            .experts = {}};
  if (!plan.shared) return part;
  part.experts.resize(static_cast<size_t>(spec.shared.count));
  if (plan.part.shared_inner.size() == 0) return part;
  for (const LoraFactors& factors : adapter.factors) {
    if (factors.mlp != WeightMlp::kShared) continue;
    matrix_of(part.experts[static_cast<size_t>(factors.expert)], factors.matrix) =
        slice_of(factors, plan.part.shared_inner);
  }
  return part;
}

size_t bytes_of(const Part& part) {
  size_t bytes = 0;
  for (const ExpertAdapter& expert : part.experts) {
    bytes += experts::packed_adapter_bytes(expert, part.shape);
  }
  return bytes;
}

experts::MlpAdapter pack(const Part& part, std::byte*& to) {
  experts::MlpAdapter packed{.dtype = part.shape.dtype, .experts = {}};
  for (const ExpertAdapter& expert : part.experts) {
    packed.experts.push_back(experts::pack_adapter(expert, part.shape, to));
    to += experts::packed_adapter_bytes(expert, part.shape);
  }
  return packed;
}

}  // namespace

std::unique_ptr<HostAdapter> pack_host_adapter(const Context& context, const LayerPlan& plan,
                                               const LoraAdapter& adapter,
                                               std::span<const int32_t> experts) {
  const Part routed = routed_part(plan, adapter, experts);
  const Part shared = shared_part(plan, adapter);
  auto packed = std::make_unique<HostAdapter>();
  const size_t bytes = bytes_of(routed) + bytes_of(shared);
  if (bytes != 0) packed->memory = cpu::Buffer(context.host_allocator(), bytes);
  std::byte* to = packed->memory.data();
  packed->routed = pack(routed, to);
  packed->shared = pack(shared, to);
  return packed;
}

std::shared_ptr<const HostAdapterTable> host_adapter_table(std::span<const HeldAdapter> adapters) {
  auto table = std::make_shared<HostAdapterTable>();
  for (const HeldAdapter& held : adapters) {
    const auto& packed = static_cast<const HostAdapter&>(*held.packed);
    table->routed.push_back(&packed.routed);
    table->shared.push_back(&packed.shared);
  }
  return table;
}

}  // namespace conclave::inline v0
