// Prefetches weights ahead of their use.
#pragma once

#include "gemm/cpu/panel_task.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Prefetches `bytes` at `data` (null: nothing) to the second-level cache, one share in each of
// `num_turns` turns.
class Ahead {
 public:
  CONCLAVE_KERNEL_INLINE Ahead(const std::byte* data, int64_t bytes, int64_t num_turns)
      : cursor_(data),
        end_(data == nullptr ? data : data + bytes),
        lines_per_turn_(num_turns > 0 ? bytes / 64 / num_turns + 1 : 0) {}

  CONCLAVE_KERNEL_INLINE void turn() {
    for (int64_t i = 0; i < lines_per_turn_ && cursor_ < end_; ++i, cursor_ += 64) {
      prefetch_line(cursor_);
    }
  }

 private:
  const std::byte* cursor_;
  const std::byte* end_;
  int64_t lines_per_turn_;
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
