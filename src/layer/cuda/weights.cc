#include "layer/cuda/weights.h"

#include "core/shared_facts.h"
#include "layer/cuda/memory_place.h"
#include "layer/cuda/mlp_source.h"
#include "layer/cuda/mlp_weights.h"
#include "layer/cuda/row_format.h"
#include "layer/cuda/weight_upload.h"
#include "layer/router_vectors.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <algorithm>
#include <cuda_runtime_api.h>
#include <numeric>
#include <span>
#include <string>

namespace conclave::inline v0 {
namespace {

// A kernel that reads a host pointer would destroy the whole device context.
void check_source_place(const WeightSource& source, int32_t ordinal) {
  if (source.memory() == MemoryKind::kHost) return;
  for (const WeightId id : weights::kAll) {
    const int64_t count = source.describe(id).count;
    for (int64_t expert = 0; expert < count; ++expert) {
      const ConstTensorView view = source.view(id, expert);
      if (!view.empty()) check_place(source.locate(id, expert), view.data, ordinal);
    }
  }
}

// Local expert of each id: physical experts, then fused shared ones; -1 if it is not on this rank.
std::vector<int32_t> local_expert_map(const CudaPlan& plan) {
  const std::vector<int32_t> routed = plan.part.placement().expert_map(plan.parallel.ep_rank);
  std::vector<int32_t> map(routed.begin(), routed.end());
  const auto local = static_cast<int32_t>(plan.part.local_experts.size());
  for (int32_t slot = 0; slot < plan.fused.slots(); ++slot) map.push_back(local + slot);
  return map;
}

bool is_identity(const std::vector<int32_t>& map) {
  for (size_t i = 0; i < map.size(); ++i) {
    if (map[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
}

class RestAllocator {
 public:
  RestAllocator(const DeviceArrays& arrays, const WeightSource& source)
      : arrays_(arrays), source_(source) {}

  // Allocates rows at multiples of 16 bytes in their own type, which is stored in `dtype`.
  DeviceMemory dense(WeightId id, DType& dtype) const {
    const WeightInfo info = source_.describe(id);
    dtype = info.dtype;
    return arrays_.make(info.rows * padded_row(info.cols, dtype) * byte_size(dtype), "gate");
  }
  DeviceMemory floats(bool wanted, int64_t count, const char* what) const {
    return wanted ? arrays_.floats(count, what) : DeviceMemory();
  }
  bool is_there(const routing::SizedRouterTensor& own) const {
    return !own.tensor->id || source_.describe(*own.tensor->id).count > 0;
  }
  // Memory for a tensor as the router reads it: both element types have 4 bytes.
  DeviceMemory words(const routing::SizedRouterTensor& own) const {
    return ints(static_cast<size_t>(own.num_elements()), std::string(own.tensor->name).c_str());
  }
  DeviceMemory ints(size_t count, const char* what) const {
    return arrays_.make(static_cast<int64_t>(count * sizeof(int32_t)), what);
  }

 private:
  const DeviceArrays& arrays_;
  const WeightSource& source_;
};

void allocate_router(const RestAllocator& allocator, const MoeSpec& spec, CudaWeights& weights) {
  const RouterSpec& router = spec.router;
  if (spec.has_gate) {
    weights.gate = allocator.dense(weights::kRouter, weights.gate_dtype);
    weights.router_bias = allocator.floats(router.has_logit_bias, num_logits(spec), "router_bias");
    weights.router_input_scale =
        allocator.floats(router.input_norm.enabled, spec.hidden_size, "router_input_scale");
  }
  weights.selection_bias = allocator.floats(
      router.has_selection_bias, spec.num_experts + spec.num_zero_experts, "selection_bias");
  weights.expert_scale =
      allocator.floats(router.has_expert_scale, spec.num_experts, "expert_scale");
  weights.global_scale = allocator.floats(router.has_global_scale, 1, "global_scale");
  for (const routing::SizedRouterTensor& own : routing::router_tensors_of(spec)) {
    if (!allocator.is_there(own)) continue;
    weights.router_tensors[own.place.value()] = allocator.words(own);
  }
}

void allocate_rest(const RestAllocator& allocator, const CudaPlan& plan,
                   const std::vector<int32_t>& map, CudaWeights& weights) {
  const MoeSpec& spec = plan.spec;
  allocate_router(allocator, spec, weights);
  const bool shared_here = plan.shared || plan.fused.slots() > 0;
  if (shared_here && shared_facts(spec).has_sigmoid_gate()) {
    weights.shared_gate = allocator.dense(weights::kSharedExpertGate, weights.shared_gate_dtype);
  }
  if (shared_facts(spec).has_mix_gate()) {
    weights.mix_gate = allocator.dense(weights::kMixGate, weights.mix_gate_dtype);
    weights.mix_gate_bias = allocator.floats(true, 2, "mix_gate_bias");
  }
  if (spec.latent.size != 0) {
    weights.latent_down = allocator.dense(weights::kLatentDown, weights.latent_down_dtype);
    weights.latent_norm = allocator.floats(spec.latent.has_norm, spec.latent.size, "latent_norm");
    weights.latent_up = allocator.dense(weights::kLatentUp, weights.latent_up_dtype);
  }
  weights.output_bias = allocator.floats(spec.has_output_bias, spec.hidden_size, "output_bias");
  if (!is_identity(map)) weights.local_expert = allocator.ints(map.size(), "local_expert");
  if (plan.part.has_replicas()) {
    weights.replica_first = allocator.ints(plan.part.replicas().first.size(), "replicas");
    weights.replicas = allocator.ints(plan.part.replicas().physical.size(), "replicas");
  }
}

// Refuses a NaN in the selection bias, which has no order, and what the router itself refuses.
void fill_checked_router(const CudaPlan& plan, const WeightSource& source, WeightUpload& upload,
                         CudaWeights& weights) {
  const RouterSpec& router = plan.spec.router;
  if (router.has_selection_bias) {
    const std::vector<float> bias = upload.read_floats(weights::kSelectionBias);
    check_selection_bias(source, bias);
    upload.copy_floats(bias, weights.selection_bias.as<float>());
  }
  for (const routing::SizedRouterTensor& own : routing::router_tensors_of(plan.spec)) {
    const DeviceMemory& memory = weights.router_tensors[own.place.value()];
    if (memory.empty()) continue;
    if (!own.tensor->id) {
      upload.copy_bytes(own.tensor->in_spec(plan.spec), memory.as());
      continue;
    }
    const Tensor values =
        checked_router_tensor(plan.spec, source, own, upload.read_matrix(*own.tensor->id));
    upload.copy_bytes({values.as<std::byte>(), values.size_bytes()}, memory.as());
  }
}

void fill_rest(const CudaPlan& plan, const WeightSource& source, WeightUpload& upload,
               CudaWeights& weights) {
  const auto dense = [&](const DeviceMemory& memory, WeightId id, DType dtype) {
    if (memory.empty()) return;
    const WeightInfo info = source.describe(id);
    upload.copy(
        {.id = id, .block = {0, info.rows, 0, info.cols}},
        {.data = memory.as(), .stride_bytes = padded_row(info.cols, dtype) * byte_size(dtype)});
  };
  const auto vector = [&](const DeviceMemory& memory, WeightId id) {
    if (!memory.empty()) upload.copy_floats(upload.read_floats(id), memory.as<float>());
  };
  dense(weights.gate, weights::kRouter, weights.gate_dtype);
  dense(weights.shared_gate, weights::kSharedExpertGate, weights.shared_gate_dtype);
  dense(weights.mix_gate, weights::kMixGate, weights.mix_gate_dtype);
  dense(weights.latent_down, weights::kLatentDown, weights.latent_down_dtype);
  dense(weights.latent_up, weights::kLatentUp, weights.latent_up_dtype);
  vector(weights.router_bias, weights::kRouterBias);
  vector(weights.router_input_scale, weights::kRouterInputScale);
  vector(weights.expert_scale, weights::kExpertScale);
  vector(weights.global_scale, weights::kGlobalScale);
  vector(weights.latent_norm, weights::kLatentNorm);
  vector(weights.output_bias, weights::kOutputBias);
  // This bias is optional; without it the memory stays cleared.
  if (source.describe(weights::kMixGateBias).count > 0) {
    vector(weights.mix_gate_bias, weights::kMixGateBias);
  }
  fill_checked_router(plan, source, upload, weights);
  if (!weights.local_expert.empty()) {
    upload.copy_ints(local_expert_map(plan), weights.local_expert.as<int32_t>());
  }
  if (plan.part.has_replicas()) {
    upload.copy_ints(plan.part.replicas().first, weights.replica_first.as<int32_t>());
    upload.copy_ints(plan.part.replicas().physical, weights.replicas.as<int32_t>());
  }
}

}  // namespace

Support usable_in_place(const CudaPlan& plan, const WeightSource& source) {
  InPlaceLayout layout;
  return find_layout(routed_source(plan), source, layout);
}

CudaWeights allocate_cuda_weights(const Context& context, const CudaPlan& plan,
                                  const WeightSource& source, Stream stream) {
  check_source_place(source, plan.device.ordinal);
  const DeviceArrays arrays(context, stream);
  CudaWeights weights;
  weights.routed = allocate_mlp(arrays, routed_source(plan), source);
  if (plan.shared) weights.shared = allocate_mlp(arrays, shared_source(plan), source);
  if (plan.residual) weights.residual = allocate_mlp(arrays, residual_source(plan), source);
  allocate_rest(RestAllocator(arrays, source), plan, local_expert_map(plan), weights);
  return weights;
}

void fill_cuda_weights(const Context& context, const CudaPlan& plan, const WeightSource& source,
                       Stream stream, CudaWeights& weights) {
  WeightUpload upload(source, to_cuda(stream));
  fill_rest(plan, source, upload, weights);
  fill_mlp(routed_source(plan), source, upload, weights.routed, context);
  if (plan.shared) fill_mlp(shared_source(plan), source, upload, weights.shared, context);
  if (plan.residual) fill_mlp(residual_source(plan), source, upload, weights.residual, context);
  upload.finish();
}

}  // namespace conclave::inline v0
