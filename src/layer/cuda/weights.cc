#include "layer/cuda/weights.h"

#include "cuda/check.h"
#include "cuda/memory_place.h"
#include "layer/cuda/exact_factors.h"
#include "layer/cuda/expert_places.h"
#include "layer/cuda/mlp_source.h"
#include "layer/cuda/mlp_weights.h"
#include "layer/cuda/row_format.h"
#include "layer/cuda/upload_lanes.h"
#include "layer/gate_values.h"
#include "layer/router_vectors.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <algorithm>
#include <cuda_runtime_api.h>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {
namespace {

// A kernel that reads a host pointer would destroy the whole device context.
void check_source_place(const WeightSource& source, int32_t ordinal) {
  if (source.memory() == MemoryKind::kHost) return;
  for (const WeightId id : weights::kAll) {
    const int64_t count = source.describe(id).count;
    for (int64_t expert = 0; expert < count; ++expert) {
      const ConstTensorView view = source.view(id, expert);
      if (!view.empty()) cuda::check_place(source.locate(id, expert), view.data, ordinal);
    }
  }
}

// Local expert of each id: physical experts, then fused shared ones; -1 if it is not on this rank.
// Ids of replicas that this placement lacks are on none.
std::vector<int32_t> local_expert_map(const CudaPlan& plan, const PlacementEpoch& epoch) {
  std::vector<int32_t> map = epoch.experts.expert_map(plan.parallel.ep_rank);
  map.resize(static_cast<size_t>(plan.part.placement().num_physical()), -1);
  const auto first = static_cast<int32_t>(plan.part.num_places());
  for (int32_t slot = 0; slot < plan.fused.slots(); ++slot) map.push_back(first + slot);
  return map;
}

bool is_identity(const std::vector<int32_t>& map) {
  for (size_t i = 0; i < map.size(); ++i) {
    if (map[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
}

// Rows of matrices begin at multiples of 16 bytes and have the type that the source stores.
CudaLayerWeight allocate_own(const DeviceArrays& arrays, const WeightShape& shape,
                             const WeightSource& source) {
  const std::string name = to_string(shape.id);
  if (shape.is_vector) return {.memory = arrays.floats(shape.cols, name.c_str())};
  const WeightInfo info = source.describe(shape.id);
  const int64_t row = padded_row(info.cols, info.dtype);
  return {.memory = arrays.make(info.rows * row * byte_size(info.dtype), name.c_str()),
          .dtype = info.dtype};
}

// Tables that may change have memory of their own also where they say nothing yet.
void allocate_tables(const DeviceArrays& arrays, const CudaPlan& plan,
                     const PlacementTables& tables, CudaWeights& weights) {
  const auto ints = [&](const std::vector<int32_t>& table, const char* what) {
    return arrays.make(static_cast<int64_t>(table.size() * sizeof(int32_t)), what);
  };
  const bool may_change = plan.part.num_spare > 0 || plan.part.has_replicas();
  if (may_change || !is_identity(tables.local_expert)) {
    weights.local_expert = ints(tables.local_expert, "local_expert");
  }
  if (!plan.part.has_replicas()) return;
  weights.replica_first = ints(tables.replica_first, "replicas");
  weights.replicas = ints(tables.replicas, "replicas");
}

void allocate_rest(const DeviceArrays& arrays, const CudaPlan& plan, const WeightSource& source,
                   CudaWeights& weights) {
  for (const WeightShape& shape : own_weights(plan)) {
    weights.own[shape.id] = allocate_own(arrays, shape, source);
  }
  // Both element types that routers read have 4 bytes.
  const auto words = [&](size_t count, std::string_view what) {
    return arrays.make(static_cast<int64_t>(count * sizeof(int32_t)), std::string(what).c_str());
  };
  for (const routing::SizedRouterTensor& own : routing::router_tensors_of(plan.spec)) {
    if (own.tensor->id && source.describe(*own.tensor->id).count == 0) continue;
    weights.router_tensors[own.place.value()] =
        words(static_cast<size_t>(own.num_elements()), own.tensor->name);
  }
  allocate_tables(arrays, plan, placement_tables(plan, *plan.part.epoch), weights);
}

[[noreturn]] void refuse_type(const WeightSource& source, WeightId id, DType held, DType found) {
  throw Error(ErrorCode::kTensorDType,
              {.what = "the layer was created for weights of another type",
               .tensor = source.locate(id, 0),
               .expected = std::string(conclave::to_string(held)),
               .found = std::string(conclave::to_string(found)),
               .hint = "convert them, or reload with ReloadMode::kStaged"});
}

// A router may do without a tensor, and the layer then has no memory for it.
void check_router_tensor(const WeightSource& source, WeightId id, const DeviceMemory& memory) {
  if ((source.describe(id).count == 0) == memory.empty()) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = memory.empty() ? "the layer was created without this tensor of its router"
                                      : "the layer was created with this tensor of its router",
               .tensor = conclave::to_string(id),
               .hint = "reload with ReloadMode::kStaged"});
}

// Refuses what the router itself refuses.
void fill_router_tensors(const CudaPlan& plan, const WeightSource& source,
                         const WantedWeights& wants, WeightUpload& upload,
                         const CudaWeights& weights) {
  for (const routing::SizedRouterTensor& own : routing::router_tensors_of(plan.spec)) {
    const DeviceMemory& memory = weights.router_tensors[own.place.value()];
    const std::optional<WeightId> id = own.tensor->id;
    if (id && !wants(*id)) continue;
    if (id) check_router_tensor(source, *id, memory);
    if (memory.empty()) continue;
    if (!id) {
      upload.copy_bytes(own.tensor->in_spec(plan.spec), memory.as());
      continue;
    }
    const Tensor values = checked_router_tensor(plan.spec, source, own, upload.read_matrix(*id));
    upload.copy_bytes({values.as<std::byte>(), values.size_bytes()}, memory.as());
  }
}

void fill_own(const WeightShape& shape, const WeightSource& source, WeightUpload& upload,
              const CudaLayerWeight& weight) {
  const WeightInfo info = source.describe(shape.id);
  // Memory of an optional weight that is not there stays cleared.
  if (info.count == 0) return;
  if (!shape.is_vector) {
    if (info.dtype != weight.dtype) refuse_type(source, shape.id, weight.dtype, info.dtype);
    return upload.copy(
        {.id = shape.id, .block = {0, info.rows, 0, info.cols}},
        {.data = weight.memory.as(),
         .stride_bytes = padded_row(info.cols, weight.dtype) * byte_size(weight.dtype)});
  }
  const std::vector<float> values = upload.read_floats(shape.id);
  // A NaN has no order.
  if (shape.id == weights::kSelectionBias) check_selection_bias(source, values);
  upload.copy_floats(values, weight.memory.as<float>());
}

void fill_rest(const Context& context, const CudaPlan& plan, const WeightSource& source,
               WeightUpload& upload, CudaWeights& weights) {
  fill_own_weights(
      context, plan, source, [](WeightId) { return true; }, upload, weights);
  const PlacementTables tables =
      placement_tables(plan, *(weights.epoch ? weights.epoch : plan.part.epoch));
  const auto copy = [&](const std::vector<int32_t>& table, const DeviceMemory& memory) {
    if (!memory.empty()) upload.copy_ints(table, memory.as<int32_t>());
  };
  copy(tables.local_expert, weights.local_expert);
  copy(tables.replica_first, weights.replica_first);
  copy(tables.replicas, weights.replicas);
}

const WeightSource& on_host(const WeightSource& source, const HostReads& copies) {
  return source.memory() == MemoryKind::kHost ? source : static_cast<const WeightSource&>(copies);
}

}  // namespace

PlacementTables placement_tables(const CudaPlan& plan, const PlacementEpoch& epoch) {
  PlacementTables tables{.local_expert = local_expert_map(plan, epoch)};
  if (!plan.part.has_replicas()) return tables;
  tables.replica_first = epoch.replicas.first;
  tables.replicas = epoch.replicas.physical;
  return tables;
}

std::vector<WeightShape> own_weights(const CudaPlan& plan) {
  std::vector<WeightShape> shapes = layer_weights(plan.spec);
  const bool shared_here = plan.shared || plan.fused.slots() > 0;
  std::erase_if(shapes, [&](const WeightShape& shape) {
    return !shape.id.layer() || routing::find_router_tensor(shape.id) != nullptr ||
           (shape.id == weights::kSharedExpertGate && !shared_here);
  });
  return shapes;
}

Support usable_in_place(const CudaPlan& plan, const WeightSource& source) {
  InPlaceLayout layout;
  return find_layout(routed_source(plan), source, layout);
}

bool needs_near_scales(const CudaPlan& plan) {
  return routed_source(plan).forms.near_scales ||
         (plan.shared && shared_source(plan).forms.near_scales);
}

int32_t read_scale_span(const CudaPlan& plan, const WeightSource& source, Stream stream) {
  const HostReads copies(source, to_cuda(stream));
  const WeightSource& readable = on_host(source, copies);
  const MlpSource routed = routed_source(plan);
  int32_t most = routed.forms.near_scales ? scale_span(routed, readable) : 0;
  if (!plan.shared) return most;
  const MlpSource shared = shared_source(plan);
  return shared.forms.near_scales ? std::max(most, scale_span(shared, readable)) : most;
}

LayerOrders read_orders(const CudaPlan& plan, const WeightSource& source, Stream stream) {
  const HostReads copies(source, to_cuda(stream));
  const WeightSource& readable = on_host(source, copies);
  LayerOrders orders;
  orders.routed = read_order(routed_source(plan), readable);
  if (plan.shared && plan.shared->problem.ordered.gate_up != 0) {
    orders.shared = read_order(shared_source(plan), readable);
  }
  return orders;
}

void place_experts(DeviceAllocator& allocator, const CudaPlan& plan, Stream stream,
                   CudaWeights& weights) {
  const PlacementTables tables = placement_tables(plan, *plan.part.epoch);
  allocate_tables(DeviceArrays(allocator, stream), plan, tables, weights);
  const auto copy = [&](const std::vector<int32_t>& table, const DeviceMemory& to) {
    if (to.empty()) return;
    cuda::check(
        cudaMemcpyAsync(to.as(), table.data(), to.bytes(), cudaMemcpyHostToDevice, to_cuda(stream)),
        "cudaMemcpyAsync");
  };
  copy(tables.local_expert, weights.local_expert);
  copy(tables.replica_first, weights.replica_first);
  copy(tables.replicas, weights.replicas);
  cuda::check(cudaStreamSynchronize(to_cuda(stream)), "cudaStreamSynchronize");
}

CudaWeights allocate_own_weights(DeviceAllocator& allocator, const CudaPlan& plan,
                                 const WantedWeights& wants, Stream stream,
                                 const CudaWeights& like) {
  const DeviceArrays arrays(allocator, stream);
  const auto another = [&](const DeviceMemory& memory, WeightId id) {
    return arrays.make(static_cast<int64_t>(memory.bytes()), conclave::to_string(id).c_str());
  };
  CudaWeights weights;
  for (const WeightShape& shape : own_weights(plan)) {
    const CudaLayerWeight& held = like.own[shape.id];
    if (!wants(shape.id)) continue;
    weights.own[shape.id] = {.memory = another(held.memory, shape.id), .dtype = held.dtype};
  }
  for (const routing::SizedRouterTensor& own : routing::router_tensors_of(plan.spec)) {
    if (!own.tensor->id || !wants(*own.tensor->id)) continue;
    weights.router_tensors[own.place.value()] =
        another(like.router_tensors[own.place.value()], *own.tensor->id);
  }
  return weights;
}

void fill_own_weights(const Context& context, const CudaPlan& plan, const WeightSource& source,
                      const WantedWeights& wants, WeightUpload& upload, CudaWeights& weights) {
  if (plan.spec.has_gate && wants(weights::kRouter)) {
    weights.gate_rows_with_nan =
        count_nan_rows(context, upload.read_matrix(weights::kRouter).view());
  }
  for (const WeightShape& shape : own_weights(plan)) {
    if (wants(shape.id)) fill_own(shape, source, upload, weights.own[shape.id]);
  }
  fill_router_tensors(plan, source, wants, upload, weights);
}

CudaWeights allocate_cuda_weights(DeviceAllocator& allocator, const CudaPlan& plan,
                                  const WeightSource& source, Stream stream) {
  check_source_place(source, plan.device.ordinal);
  const DeviceArrays arrays(allocator, stream);
  CudaWeights weights;
  weights.routed = allocate_mlp(arrays, routed_source(plan), &source);
  if (plan.shared) weights.shared = allocate_mlp(arrays, shared_source(plan), &source);
  if (plan.residual) weights.residual = allocate_mlp(arrays, residual_source(plan), &source);
  allocate_rest(arrays, plan, source, weights);
  return weights;
}

void fill_cuda_weights(const Context& context, const CudaPlan& plan, const WeightSource& source,
                       std::span<const int32_t> places, Stream stream, CudaWeights& weights) {
  PinnedRings rings;
  UploadLanes lanes(source, to_cuda(stream), plan.device.ordinal, context.executor(), rings);
  fill_rest(context, plan, source, lanes.own(), weights);
  fill_mlp(routed_source(plan, places), source, lanes, weights.routed, context);
  if (plan.shared) fill_mlp(shared_source(plan), source, lanes, weights.shared, context);
  if (plan.residual) fill_mlp(residual_source(plan), source, lanes, weights.residual, context);
  lanes.finish();
}

}  // namespace conclave::inline v0
