// Gives a test that has no GPU the host's memory for the device's: copies are made at once, and
// events have always passed. The linker gives a wrapped function's calls to __wrap_.

#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>

extern "C" {

cudaError_t __wrap_cudaMallocHost(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t __wrap_cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t __wrap_cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t __wrap_cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) {
    std::memcpy(static_cast<char*>(to) + row * to_pitch,
                static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t __wrap_cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
cudaError_t __wrap_cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t __wrap_cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t __wrap_cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t __wrap_cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

}  // extern "C"
