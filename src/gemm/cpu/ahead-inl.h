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

  // Fetches `next` while `data`, of as many bytes, is used from its first to its last. Much data is
  // fetched kDistance ahead of its use, and `next` up to there. Null for `next`: nothing.
  static CONCLAVE_KERNEL_INLINE Ahead along(const std::byte* data, const std::byte* next,
                                            int64_t bytes, int64_t num_turns) {
    Ahead ahead(next, bytes, num_turns);
    if (next == nullptr || bytes <= kMostWhole) return ahead;
    ahead.cursor_ = data + kDistance;
    ahead.end_ = data + bytes;
    ahead.then_ = next;
    return ahead;
  }

  CONCLAVE_KERNEL_INLINE void turn() {
    for (int64_t i = 0; i < lines_per_turn_ && cursor_ < end_; ++i, cursor_ += 64) {
      prefetch_line(cursor_);
    }
    if (cursor_ < end_ || then_ == nullptr) return;
    cursor_ = then_;
    end_ = then_ + kDistance;
    then_ = nullptr;
  }

 private:
  // A core read 18 GB/s with 4 to 64 KiB between fetch and use, 11 to 13 with 256 (family 6, model
  // 167); below kMostWhole either way is as fast.
  static constexpr int64_t kDistance = 16384;
  static constexpr int64_t kMostWhole = 192 * 1024;

  const std::byte* cursor_;
  const std::byte* end_;
  const std::byte* then_ = nullptr;
  int64_t lines_per_turn_;
};

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
