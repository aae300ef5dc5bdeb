// The seam of routers on a device: the same ids and weights as the host's Router makes. A router's
// own folder has its device code; routing/cuda has what they share.
#pragma once

#include "routing/cuda/bans.h"
#include "routing/router_tensors.h"

#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/spec.h"

#include <cstdint>
#include <memory>

struct CUstream_st;

namespace conclave::inline v0::routing {

struct DeviceRoutePlan;

struct DeviceRouterArgs {
  const void* logits = nullptr;  // [T, logits_stride] kF32, kBF16 or kF16
  DType logits_dtype = DType::kF32;
  int64_t logits_stride = 0;
  int64_t num_tokens = 0;
  int64_t first_token = 0;               // number of the first token in its call
  const int64_t* live_tokens = nullptr;  // device, or null; later rows are not counted
  const bool* padding_mask = nullptr;    // [T], or null; false: not counted
  const int32_t* given_ids = nullptr;    // [T, k]: recorded choices to be weighed only, or null
  const void* token_ids = nullptr;       // [T] kI32 or kI64, or null
  DType token_ids_dtype = DType::kI32;
  const void* tensors[kMaxTensorsOfRouter] = {};    // float or int32_t, in the order of the row
  int32_t table_columns = 0;                        // that tables have a column a choice for; 0: k
  DeviceBans banned = {};                           // for rules that read no logits
  const float* selection_bias = nullptr;            // [E], or null
  const float* global_scale = nullptr;              // [1], or null
  int32_t* ids = nullptr;                           // [T, k] out
  float* weights = nullptr;                         // [T, k] out
  float* shared_weights = nullptr;                  // [T, S] out, if it weighs shared experts
  uint64_t* tokens_without_finite_logit = nullptr;  // device counters to add to
  uint64_t* skipped_ids = nullptr;
};

// One layer's router, made at plan time and shared by all forwards. Nothing in it is written later.
class DeviceRouter {
 public:
  virtual ~DeviceRouter() = default;
  // How the route kernel (routing/cuda/route.h) goes on from the ids of route(); null: route() also
  // writes the weights, and the layer checks and groups the ids.
  virtual const DeviceRoutePlan* finish() const { return nullptr; }
  // Enqueues the router's own launches, and returns ids [T, k] to go on with: args.ids, the given
  // ones, or null if finish() chooses. A token id that is no row of the table chooses nothing and
  // counts as skipped.
  virtual const int32_t* route(const DeviceRouterArgs& args, CUstream_st* stream) const = 0;
};

struct DeviceRouterRow {
  Support (*supports)(const MoeSpec& spec);
  // Says whether it can run without a layer, which uploads what the spec holds; null: it can.
  Support (*runs_alone)(const MoeSpec& spec) = nullptr;
  std::unique_ptr<DeviceRouter> (*make)(const MoeSpec& spec);
  bool writes_choices = true;  // needs DeviceRouterArgs::ids and weights
};

// The device row of the spec's router, or null.
const DeviceRouterRow* find_device_router(const MoeSpec& spec) noexcept;
// No with the reason if the device cannot: without device code, as an application's own router, or
// beyond the limits of its row.
Support device_router_supports(const MoeSpec& spec);

// For limits: "`what` `found` exceeds `limit`".
Support at_most(const char* what, int64_t found, int64_t limit);

}  // namespace conclave::inline v0::routing
