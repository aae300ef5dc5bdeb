// Counts what the library asks of the CUDA runtime while armed: everything but launches, copies,
// events and graphs. The linker must put these functions before the runtime's own, as for
// cuda_forward_calls_test in tests/layer/cuda/CMakeLists.txt.
#pragma once

#include <cstdint>
#include <string>

namespace conclave::testing {

struct CudaCallCounts {
  // Questions about devices and kernels, attributes set, memory requested, waits: names of the
  // functions called, in order, separated by blanks.
  std::string planned;
  int64_t pointer_checks = 0;  // where an argument of the call lies
  int64_t device_reads = 0;    // which device was current before
};

void arm_cuda_call_counter();
CudaCallCounts disarm_cuda_call_counter();

}  // namespace conclave::testing
