#include "support/cuda/call_counter.h"

#include <atomic>
#include <cuda_runtime_api.h>
#include <mutex>

namespace conclave::testing {
namespace {

std::atomic<bool> armed = false;
std::mutex mutex;
CudaCallCounts counts;

void note(const char* function) {
  if (!armed) return;
  const std::lock_guard lock(mutex);
  counts.planned += (counts.planned.empty() ? "" : " ") + std::string(function);
}

void count(int64_t CudaCallCounts::*calls) {
  if (!armed) return;
  const std::lock_guard lock(mutex);
  ++(counts.*calls);
}

}  // namespace

void arm_cuda_call_counter() {
  const std::lock_guard lock(mutex);
  counts = {};
  armed = true;
}

CudaCallCounts disarm_cuda_call_counter() {
  armed = false;
  const std::lock_guard lock(mutex);
  return counts;
}

// The linker gives a wrapped function's calls to __wrap_ and its definition to __real_.
extern "C" {

cudaError_t __real_cudaFuncSetAttribute(const void*, cudaFuncAttribute, int);
cudaError_t __real_cudaFuncGetAttributes(cudaFuncAttributes*, const void*);
cudaError_t __real_cudaFuncSetCacheConfig(const void*, cudaFuncCache);
cudaError_t __real_cudaDeviceGetAttribute(int*, cudaDeviceAttr, int);
cudaError_t __real_cudaGetDeviceProperties(cudaDeviceProp*, int);
cudaError_t __real_cudaGetDeviceCount(int*);
cudaError_t __real_cudaOccupancyMaxActiveBlocksPerMultiprocessor(int*, const void*, int, size_t);
cudaError_t __real_cudaOccupancyMaxActiveClusters(int*, const void*, const cudaLaunchConfig_t*);
cudaError_t __real_cudaOccupancyMaxPotentialClusterSize(int*, const void*,
                                                        const cudaLaunchConfig_t*);
cudaError_t __real_cudaGetDriverEntryPointByVersion(const char*, void**, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult*);
cudaError_t __real_cudaMemGetInfo(size_t*, size_t*);
cudaError_t __real_cudaMalloc(void**, size_t);
cudaError_t __real_cudaFree(void*);
cudaError_t __real_cudaStreamSynchronize(cudaStream_t);
cudaError_t __real_cudaDeviceSynchronize();
cudaError_t __real_cudaPointerGetAttributes(cudaPointerAttributes*, const void*);
cudaError_t __real_cudaGetDevice(int*);

cudaError_t __wrap_cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value) {
  note("cudaFuncSetAttribute");
  return __real_cudaFuncSetAttribute(kernel, which, value);
}
cudaError_t __wrap_cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  note("cudaFuncGetAttributes");
  return __real_cudaFuncGetAttributes(attributes, kernel);
}
cudaError_t __wrap_cudaFuncSetCacheConfig(const void* kernel, cudaFuncCache config) {
  note("cudaFuncSetCacheConfig");
  return __real_cudaFuncSetCacheConfig(kernel, config);
}
cudaError_t __wrap_cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  note("cudaDeviceGetAttribute");
  return __real_cudaDeviceGetAttribute(value, which, device);
}
cudaError_t __wrap_cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  note("cudaGetDeviceProperties");
  return __real_cudaGetDeviceProperties(properties, device);
}
cudaError_t __wrap_cudaGetDeviceCount(int* number) {
  note("cudaGetDeviceCount");
  return __real_cudaGetDeviceCount(number);
}
cudaError_t __wrap_cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                                 int threads, size_t shared) {
  note("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return __real_cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}
cudaError_t __wrap_cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel,
                                                  const cudaLaunchConfig_t* config) {
  note("cudaOccupancyMaxActiveClusters");
  return __real_cudaOccupancyMaxActiveClusters(clusters, kernel, config);
}
cudaError_t __wrap_cudaOccupancyMaxPotentialClusterSize(int* blocks, const void* kernel,
                                                        const cudaLaunchConfig_t* config) {
  note("cudaOccupancyMaxPotentialClusterSize");
  return __real_cudaOccupancyMaxPotentialClusterSize(blocks, kernel, config);
}
cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                                    unsigned version, unsigned long long flags,
                                                    cudaDriverEntryPointQueryResult* found) {
  note("cudaGetDriverEntryPointByVersion");
  return __real_cudaGetDriverEntryPointByVersion(symbol, function, version, flags, found);
}
cudaError_t __wrap_cudaMemGetInfo(size_t* unused, size_t* total) {
  note("cudaMemGetInfo");
  return __real_cudaMemGetInfo(unused, total);
}
cudaError_t __wrap_cudaMalloc(void** data, size_t bytes) {
  note("cudaMalloc");
  return __real_cudaMalloc(data, bytes);
}
cudaError_t __wrap_cudaFree(void* data) {
  note("cudaFree");
  return __real_cudaFree(data);
}
cudaError_t __wrap_cudaStreamSynchronize(cudaStream_t stream) {
  note("cudaStreamSynchronize");
  return __real_cudaStreamSynchronize(stream);
}
cudaError_t __wrap_cudaDeviceSynchronize() {
  note("cudaDeviceSynchronize");
  return __real_cudaDeviceSynchronize();
}
cudaError_t __wrap_cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  count(&CudaCallCounts::pointer_checks);
  return __real_cudaPointerGetAttributes(attributes, data);
}
cudaError_t __wrap_cudaGetDevice(int* device) {
  count(&CudaCallCounts::device_reads);
  return __real_cudaGetDevice(device);
}

}  // extern "C"

}  // namespace conclave::testing
