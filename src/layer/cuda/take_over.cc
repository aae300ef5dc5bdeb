#include "layer/cuda/take_over.h"

#include "core/dcheck.h"
#include "cuda/check.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/code_factors.h"
#include "layer/cuda/mlp_source.h"
#include "layer/cuda/mlp_weights.h"
#include "layer/cuda/upload_lanes.h"
#include "layer/cuda/weight_planes.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <optional>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr std::array kHalves = {MlpHalf::kGateUp, MlpHalf::kDown};

// One kernel's experts in the plan, and those that are held of the same kind, if there are such.
struct MlpPair {
  MlpSource to;
  CudaMlpWeights CudaWeights::*weights = nullptr;
  std::optional<MlpSource> from;
};

std::vector<MlpPair> mlp_pairs(const CudaPlan& plan, const HeldCudaWeights& there) {
  const CudaPlan& held = there.plan;
  std::vector<MlpPair> pairs;
  pairs.push_back({routed_source(plan), &CudaWeights::routed, routed_source(held, there.places)});
  if (plan.shared) {
    pairs.push_back({shared_source(plan), &CudaWeights::shared, {}});
    if (held.shared) pairs.back().from.emplace(shared_source(held));
  }
  if (plan.residual) {
    pairs.push_back({residual_source(plan), &CudaWeights::residual, {}});
    if (held.residual) pairs.back().from.emplace(residual_source(held));
  }
  return pairs;
}

bool equal(const experts::OrderedColumns& a, const experts::OrderedColumns& b) {
  return a.gate_up_group == b.gate_up_group && a.down_group == b.down_group &&
         a.gate_up == b.gate_up && a.up_begin == b.up_begin;
}

// An expert has the same bytes in both, if it is the same one.
bool has_same_form(const MlpSource& a, const MlpSource& b) {
  const experts::ExpertsProblem& p = a.problem;
  const experts::ExpertsProblem& q = b.problem;
  const bool same_shape = p.hidden_size == q.hidden_size &&
                          p.intermediate_size == q.intermediate_size &&
                          p.activation.gated == q.activation.gated && p.has_bias == q.has_bias &&
                          a.adds_down_bias == b.adds_down_bias;
  const bool same_codes =
      p.weight_dtype == q.weight_dtype && p.quant == q.quant &&
      p.skipped_columns == q.skipped_columns && p.skipped_rows == q.skipped_rows &&
      p.whole_intermediate_size == q.whole_intermediate_size && equal(p.ordered, q.ordered) &&
      a.forms.floats == b.forms.floats && a.forms.factors == b.forms.factors &&
      a.forms.near_scales == b.forms.near_scales;
  if (!same_shape || !same_codes) return false;
  if (experts::code_order(p) != experts::code_order(q)) return false;
  return !a.forms.factors ||
         (experts::factor_form(p) == experts::factor_form(q) &&
          experts::gate_up_factor_columns(p) == experts::gate_up_factor_columns(q) &&
          experts::down_factor_columns(p) == experts::down_factor_columns(q));
}

bool is_same(const LocalExpert& a, const LocalExpert& b) {
  return a.mlp == b.mlp && a.expert == b.expert && a.inner.begin == b.inner.begin &&
         a.inner.end == b.inner.end && a.has_bias == b.has_bias &&
         a.has_down_bias == b.has_down_bias;
}

bool is_held_in_form(const MlpPair& pair, const CudaWeights& held) {
  const bool is_lent = (held.*pair.weights).in_place;
  return pair.from && !is_lent && has_same_form(pair.to, *pair.from);
}

// Finds the place of each expert of the plan among those that are held, or -1.
std::vector<int64_t> places_held(const MlpPair& pair, const CudaWeights& held) {
  std::vector<int64_t> places(pair.to.experts.size(), -1);
  if (!is_held_in_form(pair, held)) return places;
  for (size_t i = 0; i < places.size(); ++i) {
    const auto found = std::ranges::find_if(pair.from->experts, [&](const LocalExpert& expert) {
      return is_same(pair.to.experts[i], expert);
    });
    if (found != pair.from->experts.end()) places[i] = found->place;
  }
  return places;
}

// Scales of bytes have one form for all experts of a matrix, which those that are read might not
// take.
bool has_one_form_for_all(const CudaMlpWeights& weights) {
  return weights.gate_up.form.has_value() || weights.down.form.has_value();
}

// Whether the other plan has all weights of the layer itself that this one has.
bool has_own_weights(const CudaPlan& held, const CudaPlan& plan) {
  const std::vector<WeightShape> there = own_weights(held);
  return std::ranges::all_of(own_weights(plan), [&](const WeightShape& shape) {
    return std::ranges::find(there, shape.id, &WeightShape::id) != there.end();
  });
}

// Fills the places of these experts, a list for each pair.
void read_experts(const Context& context, int32_t ordinal, const std::vector<MlpSource>& missing,
                  const std::vector<MlpPair>& pairs, const WeightSource& source, Stream stream,
                  CudaWeights& weights) {
  PinnedRings rings;
  UploadLanes lanes(source, to_cuda(stream), ordinal, context.executor(), rings);
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (missing[i].experts.empty()) continue;
    fill_mlp(missing[i], source, lanes, weights.*pairs[i].weights, context);
  }
  lanes.finish();
}

class TakeOver {
 public:
  TakeOver(DeviceAllocator& allocator, const HeldCudaWeights& held, Stream stream)
      : held_(held), stream_(stream), arrays_(allocator, stream) {}

  // Experts that are not held are left to be read: of each pair one list.
  std::vector<MlpSource> experts(const std::vector<MlpPair>& pairs, CudaWeights& weights) const {
    std::vector<MlpSource> missing;
    for (const MlpPair& pair : pairs) {
      CudaMlpWeights& to = weights.*pair.weights;
      to = allocate_mlp(arrays_, pair.to, nullptr);
      missing.push_back(copy_held(pair, to));
    }
    return missing;
  }

  void own(CudaWeights& weights) const {
    for (const WeightId id : weights::kAll) {
      const CudaLayerWeight& from = held_.weights.own[id];
      if (from.memory.empty()) continue;
      weights.own[id] = {.memory = another(from.memory), .dtype = from.dtype};
    }
    for (size_t i = 0; i < weights.router_tensors.size(); ++i) {
      weights.router_tensors[i] = another(held_.weights.router_tensors[i]);
    }
  }

 private:
  MlpSource copy_held(const MlpPair& pair, CudaMlpWeights& to) const {
    const CudaMlpWeights& from = held_.weights.*pair.weights;
    std::vector<int64_t> places = places_held(pair, held_.weights);
    const bool some_missing = std::ranges::find(places, -1) != places.end();
    if (some_missing && has_one_form_for_all(from)) std::ranges::fill(places, -1);
    MlpSource missing = pair.to;
    missing.experts.clear();
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i] < 0) missing.experts.push_back(pair.to.experts[i]);
    }
    if (missing.experts.size() == places.size()) return missing;
    for (const MlpHalf half : kHalves) copy_half(pair, places, half, from, to);
    copy(from.static_scales, to.static_scales);
    return missing;
  }

  void copy_half(const MlpPair& pair, const std::vector<int64_t>& places, MlpHalf half,
                 const CudaMlpWeights& held, CudaMlpWeights& weights) const {
    const std::vector<ExpertPlane> from = planes_of(*pair.from, held, half);
    const std::vector<ExpertPlane> to = planes_of(pair.to, weights, half);
    CONCLAVE_DCHECK(from.size() == to.size());
    const auto place_of = [&](size_t expert) { return pair.to.experts[expert].place; };
    // Experts that follow each other in both go together.
    for (size_t begin = 0, end = 0; begin < places.size(); begin = end) {
      for (end = begin + 1; end < places.size() && places[begin] >= 0 &&
                            places[end] == places[end - 1] + 1 &&
                            place_of(end) == place_of(end - 1) + 1;) {
        ++end;
      }
      if (places[begin] < 0) continue;
      for (size_t plane = 0; plane < from.size(); ++plane) {
        CONCLAVE_DCHECK(from[plane].bytes == to[plane].bytes);
        copy(from[plane].at(places[begin]), to[plane].at(place_of(begin)),
             (end - begin) * from[plane].bytes);
      }
    }
    const CudaMatrixMemory& one = held.of(half);
    CudaMatrixMemory& other = weights.of(half);
    copy(one.byte_form, other.byte_form);
    other.form = one.form;
    if (other.short_scales.empty()) return;
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i] < 0) continue;
      other.has_short_scales[static_cast<size_t>(place_of(i))] =
          one.has_short_scales[static_cast<size_t>(places[i])];
    }
    // One byte of an integer of value 1 or 0.
    cuda::check(cudaMemsetAsync(other.short_scales.as(), has_only_short_scales(other) ? 1 : 0, 1,
                                to_cuda(stream_)),
                "cudaMemsetAsync");
  }

  DeviceMemory another(const DeviceMemory& from) const {
    DeviceMemory memory = arrays_.make(static_cast<int64_t>(from.bytes()), "weights");
    copy(from, memory);
    return memory;
  }
  void copy(const DeviceMemory& from, const DeviceMemory& to) const {
    copy(from.as(), to.as(), to.bytes());
  }
  void copy(const std::byte* from, std::byte* to, size_t bytes) const {
    if (bytes == 0) return;
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, to_cuda(stream_)),
                "cudaMemcpyAsync");
  }

  const HeldCudaWeights& held_;
  Stream stream_;
  DeviceArrays arrays_;
};

}  // namespace

int64_t first_missing(const CudaPlan& plan, const HeldCudaWeights& held) {
  const bool lacks_dense = plan.part.holds_dense && !held.plan.part.holds_dense;
  if (lacks_dense || !has_own_weights(held.plan, plan)) return plan.spec.num_experts;
  for (const MlpPair& pair : mlp_pairs(plan, held)) {
    const std::vector<int64_t> places = places_held(pair, held.weights);
    const auto missing = std::ranges::find(places, -1);
    if (missing == places.end()) continue;
    const LocalExpert& expert = pair.to.experts[static_cast<size_t>(missing - places.begin())];
    const bool is_lacking = expert.mlp == WeightMlp::kRouted && is_held_in_form(pair, held.weights);
    return is_lacking ? expert.expert : plan.spec.num_experts;
  }
  return -1;
}

CudaWeights take_over_cuda_weights(const Context& context, DeviceAllocator& allocator,
                                   const CudaPlan& plan, const HeldCudaWeights& held,
                                   const WeightSource* source, Stream stream) {
  // Weights that lie on a device already may be used there.
  const bool has_own = has_own_weights(held.plan, plan);
  if (source != nullptr && (source->memory() == MemoryKind::kDevice || !has_own)) {
    CudaWeights weights = allocate_cuda_weights(allocator, plan, *source, stream);
    fill_cuda_weights(context, plan, *source, plan.part.local_experts, stream, weights);
    return weights;
  }
  const TakeOver take_over(allocator, held, stream);
  const std::vector<MlpPair> pairs = mlp_pairs(plan, held);
  CudaWeights weights;
  weights.gate_rows_with_nan = held.weights.gate_rows_with_nan;
  const std::vector<MlpSource> missing = take_over.experts(pairs, weights);
  take_over.own(weights);
  place_experts(allocator, plan, stream, weights);
  if (source != nullptr) {
    read_experts(context, plan.device.ordinal, missing, pairs, *source, stream, weights);
  }
  cuda::check(cudaStreamSynchronize(to_cuda(stream)), "cudaStreamSynchronize");
  return weights;
}

}  // namespace conclave::inline v0
