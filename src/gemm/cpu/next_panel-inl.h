// Fetching of weights ahead of their use.
#pragma once

#include "gemm/cpu/panel_task.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// Fetches the next panel while this one is computed: each of `num_turns` turns brings its share.
class NextPanel {
 public:
  CONCLAVE_KERNEL_INLINE NextPanel(const PanelTask& task, int64_t num_turns)
      : cursor_(task.next_panel), end_(task.next_panel + task.next_panel_bytes) {
    const int64_t lines = static_cast<int64_t>(task.next_panel_bytes) / 64;
    lines_per_turn_ = task.next_panel == nullptr ? 0 : lines / num_turns + 1;
  }

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
