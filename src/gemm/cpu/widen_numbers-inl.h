// All numbers of a panel widened to float32, once for all rows of a task.
#pragma once

#include "gemm/cpu/group_numbers-inl.h"

namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE {

// A WidenFunction.
CONCLAVE_KERNEL_INLINE void widen_numbers(const GroupNumbers& numbers, int64_t groups,
                                          float* floats) {
  for (int64_t group = 0; group < groups; ++group) {
    numbers_of(numbers, group, floats + group * 64);
  }
}

}  // namespace conclave::inline v0::gemm::CONCLAVE_ISA_NAMESPACE
