#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "record/cuda/ring_kernel.h"

#include <algorithm>
#include <cstdint>

namespace conclave::inline v0::record {
namespace {

constexpr int32_t kWarps = 4;
constexpr int64_t kMaxBlocks = 2048;

// The ring takes rows [first, end) of a call.
struct Taken {
  int64_t given = 0;  // tokens that came before the call
  int64_t count = 0;  // tokens that the call has
  int64_t first = 0;
  int64_t end = 0;
  bool refused = false;
};

__device__ Taken taken_rows(const DeviceRingRows& rows) {
  Taken taken{.given = static_cast<int64_t>(rows.state->given), .count = rows.num_tokens};
  if (rows.live_tokens != nullptr) {
    taken.count = max(int64_t{0}, min(rows.num_tokens, *rows.live_tokens));
  }
  const int64_t room = rows.capacity - min(taken.given, rows.capacity);
  taken.end = taken.count;
  if (rows.when_full == WhenFull::kDropOldest) {
    taken.first = max(int64_t{0}, taken.count - rows.capacity);
  } else if (rows.when_full == WhenFull::kDropNewest) {
    taken.end = min(taken.count, room);
  } else if (taken.count > room) {
    taken.refused = true;
    taken.end = 0;
  }
  return taken;
}

__device__ int64_t id_at(const DeviceRingRows& rows, int64_t row, int32_t slot) {
  const int64_t at = row * rows.ids_stride + slot;
  if (rows.ids_dtype == DType::kI64) return static_cast<const int64_t*>(rows.ids)[at];
  return static_cast<const int32_t*>(rows.ids)[at];
}

__device__ void add(uint64_t* word, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}

// Keeps the lowest number; 0 is none.
__device__ void note_bad_id(DeviceRingState& state, uint64_t number) {
  add(&state.bad_ids, 1);
  auto* const first = reinterpret_cast<unsigned long long*>(&state.first_bad_id);
  unsigned long long known = *first;
  while (known == 0 || number < known) {
    const unsigned long long found = atomicCAS(first, known, number);
    if (found == known) return;
    known = found;
  }
}

// By a whole warp. Ids are checked even in rows that the ring does not take.
__device__ void append_row(const DeviceRingRows& rows, const Taken& taken, int64_t row) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t number = taken.given + row;
  const bool keeps = row >= taken.first && row < taken.end;
  const int64_t at = number % rows.capacity;
  if (keeps && lane < 2) {
    const int64_t numbered = lane == 0 ? 0 : number;
    rows.ring_tokens[at * 2 + lane] =
        rows.tokens != nullptr ? rows.tokens[row * rows.tokens_stride + lane] : numbered;
  }
  for (int32_t slot = lane; slot < rows.slots; slot += 32) {
    const int64_t id = id_at(rows, row, slot);
    if (id < -1 || id >= rows.num_ids) {
      note_bad_id(*rows.state, static_cast<uint64_t>(number * rows.slots + slot) + 1);
    }
    if (!keeps) continue;
    rows.ring_ids[at * rows.slots + slot] = static_cast<int32_t>(id);
    rows.ring_weights[at * rows.slots + slot] = rows.weights[row * rows.weights_stride + slot];
  }
}

// The last block to end counts the call: until then all blocks read the same number of tokens.
__device__ void end_block(const DeviceRingRows& rows, const Taken& taken) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  DeviceRingState& state = *rows.state;
  __threadfence();
  const unsigned long long ended =
      atomicAdd(reinterpret_cast<unsigned long long*>(&state.ended_blocks), 1ULL);
  if (ended + 1 != gridDim.x) return;
  state.ended_blocks = 0;
  (taken.refused ? state.refused : state.given) += static_cast<uint64_t>(taken.count);
}

__global__ void __launch_bounds__(kWarps * 32)
    append_kernel(const __grid_constant__ DeviceRingRows rows) {
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const Taken taken = taken_rows(rows);
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
       !taken.refused && row < taken.count; row += step) {
    append_row(rows, taken, row);
  }
  end_block(rows, taken);
}

}  // namespace

void append_rows(const DeviceRingRows& rows, CUstream_st* stream) {
  if (rows.num_tokens == 0) return;
  cuda::launch("record.append", append_kernel,
               {.blocks = std::min(kMaxBlocks, ceil_div(rows.num_tokens, int64_t{kWarps})),
                .threads = kWarps * 32,
                .stream = stream},
               rows);
}

}  // namespace conclave::inline v0::record
