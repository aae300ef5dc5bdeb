// A scope at whose end a stream has passed.
#pragma once

#include <cuda_runtime_api.h>

namespace conclave::inline v0::cuda {

// Waits for the stream when it goes: nothing that work there reads is needed any more then.
class Drained {
 public:
  explicit Drained(cudaStream_t stream) : stream_(stream) {}
  Drained(const Drained&) = delete;
  Drained& operator=(const Drained&) = delete;
  ~Drained() { static_cast<void>(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_;
};

}  // namespace conclave::inline v0::cuda
