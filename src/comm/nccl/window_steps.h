// One launch for an operation of all ranks: bytes go through windows, and the sums of what comes
// are made in rank order. It marks its turn and its end, and compares what ranks mean.
#pragma once

#include "comm/nccl/device_steps.h"
#include "comm/nccl/window_layout.h"

#include "conclave/comm.h"
#include "conclave/dtype.h"

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace conclave::inline v0::comm {

// Each rank counts its operations in device memory, also those of graphs.
struct WindowTurns {
  uint32_t epoch;
  uint32_t blocks_done;
};

// One goes to each peer through its window, and one comes from it through this rank's own.
struct WindowMessage {
  std::byte* window;  // the peer's
  const std::byte* send;
  int64_t send_bytes;
  std::byte* recv;
  int64_t recv_bytes;
  DeviceClaim claim;
};
// The marks of the operation, in host memory, with their counters on the device.
struct WindowMarks {
  uint32_t* begun_count;  // null: a launch before this one has marked the turn
  uint32_t* begun;
  uint32_t* collectives_count;
  uint32_t* collectives;
  uint32_t* ended_count;  // null: launches follow, the last of which marks the end
  uint32_t* ended;
  uint32_t* mismatches_count;
  uint32_t* mismatches;
  DeviceClaim* mine;
  DeviceClaim* theirs;
};
struct WindowParams {
  int32_t rank;
  int32_t ranks;
  std::byte* window;  // this rank's own
  int64_t slot_bytes;
  int32_t lane_bits;
  WindowTurns* turns;
  const uint32_t* stop;     // in host memory: not 0 once the communicator has failed
  DeviceClaim* claims_out;  // on the device, those of peers in rank order
  DeviceClaim* claims_in;
  WindowMarks marks;
  WindowMessage messages[kMaxWindowRanks];  // that of this rank to itself: a copy
};

// Enqueues the exchange, after which each peer's bytes are at their places.
void exchange_by_windows(const WindowParams& params, CUstream_st* stream);

// The addends of a sum: this rank's own, and a message of each peer with as many bytes.
struct WindowSum {
  const std::byte* own = nullptr;
  std::byte* out = nullptr;
  int64_t bytes = 0;
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
};
// Enqueues the exchange and out = part of rank 0 op part of rank 1 op ..., as add_in_order does.
void add_by_windows(const WindowParams& params, const WindowSum& sum, CUstream_st* stream);

// Loads the kernels on the current device, so that no operation has to.
void prepare_window_steps();

}  // namespace conclave::inline v0::comm
