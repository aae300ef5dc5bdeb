// A counter from which the blocks of a launch draw pieces of work; it need not be cleared
// beforehand.
#pragma once

#include "cuda/device/copy.cuh"
#include "experts/cuda/common/vocabulary.h"

#include <cstdint>

namespace conclave::inline v0::experts {

// 16 bytes of a workspace, aligned to 16: a mark of 96 bits above the number of tickets drawn. A
// thread that finds no mark writes it with a count of 0; the thread that draws a launch's last
// ticket resets the count.
struct TicketCounter {
  static constexpr uint64_t kMarkHigh = 0x9D39C8B2E5A1F764;
  static constexpr uint64_t kMarkLow = 0x5BD1E995;  // above the count

  void* memory = nullptr;

  // Every thread calls it before its first draw, after earlier users of the workspace have ended.
  __device__ __forceinline__ void mark() const {
    const ptx::Word128 found = ptx::compare_and_swap_128(memory, {}, {});
    if (found.high == kMarkHigh && found.low >> 32 == kMarkLow) return;
    ptx::compare_and_swap_128(memory, found, {kMarkLow << 32, kMarkHigh});
  }
  __device__ __forceinline__ uint32_t draw() const {
    return ptx::add_relaxed(static_cast<uint32_t*>(memory), 1);
  }
  __device__ __forceinline__ void reset() const { *static_cast<volatile uint32_t*>(memory) = 0; }
};

}  // namespace conclave::inline v0::experts
