// The k of a panel of codes that share scales.
#pragma once

#include "gemm/cpu/panel_task.h"
#include "gemm/cpu/simd-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

CONCLAVE_KERNEL_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
CONCLAVE_KERNEL_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// Returns the end of the run of k, starting at `begin`, that shares one weight scale and one row
// scale and crosses no multiple of exact_k. With an order it is all that is left: each weight is
// scaled when it is decoded.
CONCLAVE_KERNEL_INLINE int64_t segment_end(const PanelTask& task, int64_t begin) {
  if (task.order.lower != nullptr) return task.k;
  const WeightGroups groups{.k = task.k, .width = task.scale_width, .skip = task.scale_skip};
  if (task.row_scales.first != nullptr) return segment_end(groups, task.row_scales, begin);
  return segment_end(groups, {.width = task.k}, begin);
}

// The group of a k, and the place of its scales among float32 ones, for groups of neighbours; its
// offsets lie likewise.
CONCLAVE_KERNEL_INLINE int64_t scale_group(const PanelTask& task, int64_t k) {
  return (k + task.scale_skip) / task.scale_width;
}
CONCLAVE_KERNEL_INLINE int64_t scale_index(const PanelTask& task, int64_t k) {
  return scale_group(task, k) * 64;
}

// function.template call<N>() for N = count, at most kMost.
template <int kMost, class Function>
CONCLAVE_KERNEL_INLINE void call_for(int64_t count, const Function& function) {
  if constexpr (kMost > 1) {
    if (count < kMost) return call_for<kMost - 1>(count, function);
  }
  function.template call<kMost>();
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
