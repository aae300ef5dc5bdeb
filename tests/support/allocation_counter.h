// Counts heap allocations and mappings of the whole process while armed. One executable links
// allocation_counter.cc; every other is unaffected.
#pragma once

#include <cstdint>

namespace conclave::testing {

struct AllocationCounts {
  int64_t heap = 0;
  int64_t own_heap = 0;  // by the thread that armed it: a GPU's driver has threads that allocate
  int64_t mappings = 0;
};

void arm_allocation_counter();
AllocationCounts disarm_allocation_counter();

// Makes the n-th heap allocation from now on fail (0: the next one); a negative n disables this.
void fail_heap_allocation(int64_t n);
bool heap_allocation_failed();

}  // namespace conclave::testing
