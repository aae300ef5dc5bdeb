// One fault per tool of compute-sanitizer, selected by name: a tool that finds nothing here proves
// nothing anywhere. Returns 0 if the kernel ran, whatever it did.
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 64;

// Reads behind the end of the input.
__global__ void read_beyond(const int* input, int* output) {
  output[threadIdx.x] = input[threadIdx.x + kThreads * 1024];
}

// Reads a neighbour's value without a barrier in between.
__global__ void race(int* output) {
  __shared__ int values[kThreads];
  values[threadIdx.x] = static_cast<int>(threadIdx.x) * output[threadIdx.x];
  output[threadIdx.x] = values[(threadIdx.x + 33) % kThreads];
}

// Half of the warp skips the barrier.
__global__ void part_of_a_barrier(int* output) {
  if (threadIdx.x % 2 == 0) __syncthreads();
  output[threadIdx.x] = 1;
}

// Reads memory that nobody wrote.
__global__ void read_unwritten(const int* input, int* output) {
  output[threadIdx.x] = input[threadIdx.x];
}

int* allocate() {
  void* data = nullptr;
  return cudaMalloc(&data, kThreads * sizeof(int)) == cudaSuccess ? static_cast<int*>(data)
                                                                  : nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const char* const tool = argc > 1 ? argv[1] : "";
  int* const input = allocate();
  int* const output = allocate();
  if (input == nullptr || output == nullptr) return 2;
  if (std::strcmp(tool, "initcheck") != 0) {
    if (cudaMemset(input, 0, kThreads * sizeof(int)) != cudaSuccess) return 2;
    if (cudaMemset(output, 0, kThreads * sizeof(int)) != cudaSuccess) return 2;
  }
  if (std::strcmp(tool, "memcheck") == 0) read_beyond<<<1, kThreads>>>(input, output);
  if (std::strcmp(tool, "racecheck") == 0) race<<<1, kThreads>>>(output);
  if (std::strcmp(tool, "synccheck") == 0) part_of_a_barrier<<<1, kThreads>>>(output);
  if (std::strcmp(tool, "initcheck") == 0) read_unwritten<<<1, kThreads>>>(input, output);
  std::printf("%s: %s\n", tool, cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
