// A small forward in one launch, as a GPU may have it: experts and weighted sum; the routing is
// given.
#pragma once

#include "core/device_flow.h"
#include "experts/cuda/device_experts.h"

#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace conclave::inline v0::experts {

struct OneLaunchCall {
  const void* hidden = nullptr;  // [T, H] in `hidden_dtype`, not quantised
  DType hidden_dtype = DType::kBF16;
  int64_t hidden_stride = 0;
  int64_t num_tokens = 0;                // T of the call: the grid and loops are sized by it
  const int64_t* live_tokens = nullptr;  // on the device, or null: only the first *live_tokens
                                         // count, rows of `out` beyond are not written
  // Slots that every token has after those of topk_ids and topk_weights, which then are [T, k -
  // shared.count].
  SharedSlots shared = {};
  const int32_t* topk_ids = nullptr;      // [T, k] logical; negative: contributes nothing
  const float* topk_weights = nullptr;    // [T, k]
  const int32_t* local_expert = nullptr;  // [E] local expert or -1; null: the id itself
  int64_t num_experts = 0;                // ids at or above contribute nothing
  // On the device, or null: increased by the number of live ids below -1 or at or above
  // num_experts.
  uint64_t* skipped_ids = nullptr;
  bool weight_on_input = false;
  float output_scale = 1;
  uint32_t* counters = nullptr;  // kWorkspaceCounterBytes, zero before the first call
  void* workspace = nullptr;     // the row's workspace_bytes, 256-byte aligned
  void* out = nullptr;           // [T, H] in `out_dtype`
  DType out_dtype = DType::kBF16;
  int64_t out_stride = 0;
};

class OneLaunchKernel {
 public:
  virtual ~OneLaunchKernel() = default;
  virtual int64_t max_tokens() const = 0;
  virtual std::string describe() const = 0;
  // One cooperative launch. Each call leaves the counters zero for the next.
  virtual void run(const OneLaunchCall& call, CUstream_st* stream) const = 0;
};

}  // namespace conclave::inline v0::experts
