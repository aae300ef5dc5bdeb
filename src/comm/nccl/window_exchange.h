// Operations on device memory through peers' windows, in one launch that also says what this rank
// means.
#pragma once

#include "comm/agreement.h"
#include "comm/nccl/device_steps.h"
#include "comm/nccl/window_layout.h"
#include "comm/nccl/window_steps.h"
#include "comm/one_launch.h"
#include "cuda/memory.h"

#include "conclave/comm.h"
#include "conclave/dtype.h"

#include <cstdint>

namespace conclave::inline v0::comm {

// Whether what arrives is added up: reductions, and an all-to-all whose bytes have a type.
inline bool adds_up(const CommOperation& operation) {
  return is_reduction(operation.kind) ||
         (operation.kind == CommKind::kAllToAllV && operation.dtype != DType::kU8);
}

class WindowExchange {
 public:
  struct Claims {
    DeviceClaim* out = nullptr;  // on the device, of peers in rank order
    DeviceClaim* in = nullptr;
  };
  // On the current device. The windows outlive it; `stop` is not 0 once waits are to end.
  WindowExchange(const WindowBlocks& windows, int32_t rank, Claims claims, const uint32_t* stop);

  // Enqueues the operation with `claims` for the peers: one launch, or two for a long sum of more
  // than two ranks.
  void launch(const CommOperation& operation, const DeviceClaims& claims, const MarkPlace& place,
              CUstream_st* stream) const;
  // The same for an operation whose kernel is another's: each claim says how many bytes its message
  // has.
  void launch(const WindowKernel& kernel, const DeviceClaims& claims, const MarkPlace& place,
              CUstream_st* stream) const;

 private:
  WindowParams params_for(const DeviceClaims& claims, const MarkPlace& place) const;
  // Whether each rank adds up a block and gives it to all, instead of everything.
  bool goes_by_blocks(const CommOperation& operation) const;
  void add_by_blocks(const CommOperation& operation, const WindowParams& params,
                     CUstream_st* stream) const;
  void exchange(const CommOperation& operation, WindowParams& params, CUstream_st* stream) const;
  void add(const CommOperation& operation, WindowParams& params, CUstream_st* stream) const;

  WindowBlocks windows_;
  int32_t rank_;
  Claims claims_;
  const uint32_t* stop_;
  cuda::DeviceBuffer turns_;
};

}  // namespace conclave::inline v0::comm
