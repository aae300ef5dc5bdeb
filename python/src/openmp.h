// The threads of the OpenMP runtime that PyTorch computes with. Where there are as many threads as
// cores, two pools are slower than one by far: each waits for its tasks by spinning, on the core
// that the other needs.
#pragma once

#include "conclave/context.h"

#include <cstdint>

namespace conclave::python {

// GNU's runtime, found among the libraries of the process by name and used through its entry
// points, so that nothing links to it.
class OpenMpThreads {
 public:
  // The runtime that is loaded, PyTorch's own copy before others; null where there is none. Looks
  // once it was found no more.
  static const OpenMpThreads* find();

  // Runs task(0) to task(num_workers - 1) on at most `num_threads` threads, the caller being one.
  void run(ParallelTask task, int32_t num_workers, int32_t num_threads) const;

 private:
  using Parallel = void (*)(void (*body)(void*), void* state, unsigned num_threads, unsigned flags);

  explicit OpenMpThreads(Parallel parallel) : parallel_(parallel) {}
  static const OpenMpThreads* load();

  Parallel parallel_;
};

}  // namespace conclave::python
