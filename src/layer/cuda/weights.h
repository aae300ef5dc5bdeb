// The weights of a layer in device memory, in the canonical layout: [E, 2I, H] of gate rows, then
// up rows, and [E, H, I], rows at multiples of 16 bytes.
#pragma once

#include "core/relaxed_count.h"
#include "experts/cuda/device_experts.h"
#include "experts/cuda/scale_bytes.h"
#include "layer/cuda/device_memory.h"
#include "layer/cuda/mlp_source.h"
#include "layer/cuda/plan.h"
#include "layer/router_vectors.h"
#include "placement/epoch.h"
#include "routing/router_tensors.h"
#include "spec/layer_weights.h"

#include "conclave/weights.h"

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace conclave::inline v0 {

class WeightUpload;

// Memory for a matrix of one MLP's experts, and for what belongs to it.
struct CudaMatrixMemory {
  DeviceMemory data;
  DeviceMemory bias;
  DeviceMemory scale;
  DeviceMemory offset;
  DeviceMemory factor_scale;
  DeviceMemory short_scales;
  // FactorForm::kExact has these.
  DeviceMemory sum_factor;
  DeviceMemory byte_form;
  DeviceMemory step_units;  // a FactorForm that has_steps has these
  DeviceMemory factor_zero;
  DeviceMemory factor_offset;

  // The host knows these: how many scales an expert has as float32, the form of those that are
  // bytes, and of which places they are short.
  int64_t num_scales = 0;
  std::optional<experts::ByteForm> form;
  std::vector<uint8_t> has_short_scales;  // 1 or 0: threads write neighbours
};

// How the rows of experts that read their own are made: [E, stride] each; empty for none.
struct OwnRowTables {
  DeviceMemory columns;  // int32: the column of the token's row at each place; -1: none
  DeviceMemory factors;  // float32: what it is multiplied by
  int64_t stride = 0;
};

// One MLP's experts, in own memory or in the source's; `view` points to either.
struct CudaMlpWeights {
  CudaMatrixMemory gate_up;
  CudaMatrixMemory down;
  DeviceMemory static_scales;  // [2]: input, intermediate
  OwnRowTables own_rows;
  DeviceMemory column_factors;  // [E, I] float32, of down
  // [E, I] int32: the stored column of down in each place, -1: none. Where columns have an order.
  DeviceMemory inner_columns;
  experts::DeviceExperts view;
  bool in_place = false;

  CudaMatrixMemory& of(MlpHalf half) { return half == MlpHalf::kGateUp ? gate_up : down; }
  const CudaMatrixMemory& of(MlpHalf half) const {
    return half == MlpHalf::kGateUp ? gate_up : down;
  }
};

// A weight of the layer itself: a matrix as stored, rows at multiples of 16 bytes, or a vector of
// float32.
struct CudaLayerWeight {
  DeviceMemory memory;
  DType dtype = DType::kF32;
};

struct CudaWeights {
  CudaMlpWeights routed;
  CudaMlpWeights shared;
  CudaMlpWeights residual;
  RelaxedCount gate_rows_with_nan;
  WeightTable<CudaLayerWeight> own;  // by LayerWeight, but for tensors of the router's own:
  std::array<DeviceMemory, routing::kMaxTensorsOfRouter> router_tensors;  // in the row's order
  DeviceMemory local_expert;   // [ids] int32; empty if all experts are here, in order, for good
  DeviceMemory replica_first;  // [E + 1] int32, for a layer with redundant experts
  DeviceMemory replicas;       // [P] int32: physical experts of each logical one
  // The placement that these tables say; null: that of the plan.
  std::shared_ptr<const PlacementEpoch> epoch;

  const float* floats(WeightId id) const { return own[id].memory.as<float>(); }
};

// The tables of a placement as they lie on the device; those that a layer lacks are empty.
struct PlacementTables {
  std::vector<int32_t> local_expert = {};
  std::vector<int32_t> replica_first = {};
  std::vector<int32_t> replicas = {};
};
PlacementTables placement_tables(const CudaPlan& plan, const PlacementEpoch& epoch);

// Yes if the routed experts of a source of device memory can be used in place, as [E, 2I, H] and
// [E, H, I]; otherwise the reason, for `explain`.
Support usable_in_place(const CudaPlan& plan, const WeightSource& source);

// The orders of columns of the source's experts on this rank. Waits for copies on `stream`.
LayerOrders read_orders(const CudaPlan& plan, const WeightSource& source, Stream stream);

// Whether a kernel of the plan takes scales of a matrix only if they lie near each other, and how
// many powers of two those of the source lie apart at most.
bool needs_near_scales(const CudaPlan& plan);
int32_t read_scale_span(const CudaPlan& plan, const WeightSource& source, Stream stream);

// The weights of the layer itself that this rank has, but for tensors of the router's own.
std::vector<WeightShape> own_weights(const CudaPlan& plan);

// Memory for the maps by which ids find experts on this rank, filled. Waits for `stream`.
void place_experts(DeviceAllocator& allocator, const CudaPlan& plan, Stream stream,
                   CudaWeights& weights);

// Memory for weights of the layer itself as `like` has them, those that are wanted; cleared. A
// router's tensors that come from the spec alone do not count.
CudaWeights allocate_own_weights(DeviceAllocator& allocator, const CudaPlan& plan,
                                 const WantedWeights& wants, Stream stream,
                                 const CudaWeights& like);
// Fills them, and counts the gate's rows with NaN. Throws Error(kTensorDType) where the source
// stores another type than they were allocated for, and as fill_weights.
void fill_own_weights(const Context& context, const CudaPlan& plan, const WeightSource& source,
                      const WantedWeights& wants, WeightUpload& upload, CudaWeights& weights);

// Memory for the plan's weights, cleared; none for matrices that `source` lends. Enqueued on
// `stream`.
CudaWeights allocate_cuda_weights(DeviceAllocator& allocator, const CudaPlan& plan,
                                  const WeightSource& source, Stream stream);

// Fills `weights`: `places` are those of routed_source. Waits until the source is no longer needed.
// Throws as fill_weights.
void fill_cuda_weights(const Context& context, const CudaPlan& plan, const WeightSource& source,
                       std::span<const int32_t> places, Stream stream, CudaWeights& weights);

}  // namespace conclave::inline v0
