// The threads of the OpenMP runtime that PyTorch computes with. With as many threads as cores, two
// pools are far slower than one: each spins while waiting for tasks, on the cores that the other
// needs.
#pragma once

#include "conclave/context.h"

#include <cstdint>

namespace conclave::python {

// GNU's runtime, found by name among the libraries of the process and called through its entry
// points, so that nothing links to it.
class OpenMpThreads {
 public:
  // The loaded runtime, PyTorch's own copy before others; null if there is none. Once found, it is
  // not searched for again.
  static const OpenMpThreads* find();

  // Runs task(0) to task(num_workers - 1) on at most `num_threads` threads, including the caller.
  void run(ParallelTask task, int32_t num_workers, int32_t num_threads) const;

 private:
  using Parallel = void (*)(void (*body)(void*), void* state, unsigned num_threads, unsigned flags);

  explicit OpenMpThreads(Parallel parallel) : parallel_(parallel) {}
  static const OpenMpThreads* load();

  Parallel parallel_;
};

}  // namespace conclave::python
