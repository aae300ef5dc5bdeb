#include "ceilings.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "support/cuda/device_fill.h"
#include "support/cuda/graph_timer.h"

#include <algorithm>
#include <cstdint>

namespace conclave::bench {

namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 8;  // 16-byte loads in flight per thread
constexpr int64_t kBytes = int64_t{8} << 30;

// Consecutive blocks read consecutive chunks. The sum is stored only if it equals a number that
// random data does not give, so that no load can be optimised away.
__global__ void read_kernel(const uint4* data, uint32_t* sink) {
  const uint4* chunk = data + int64_t{blockIdx.x} * kThreads * kLoads + threadIdx.x;
  uint4 values[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) values[i] = __ldcs(chunk + i * kThreads);
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) sum ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
  if (sum == 0x12345678U && threadIdx.x == kThreads) *sink = sum;
}

}  // namespace

double read_stream_tbps() {
  const cuda::DeviceBuffer data(static_cast<size_t>(kBytes));
  const cuda::DeviceBuffer sink(sizeof(uint32_t));
  const int64_t columns = 4096;
  testing::fill_normal({.data = data.data(),
                        .dtype = DType::kBF16,
                        .rows = kBytes / 2 / columns,
                        .cols = columns,
                        .stride = columns},
                       nullptr);
  const double microseconds =
      testing::time_graph({.inputs = 1, .replays = 9}, [&](int32_t, CUstream_st* stream) {
        cuda::launch("bench.read", read_kernel,
                     {.blocks = kBytes / (16 * kThreads * kLoads),
                      .threads = kThreads,
                      .overlap = cuda::Overlap::kNone,
                      .stream = stream},
                     data.as<uint4>(), sink.as<uint32_t>());
      });
  return static_cast<double>(kBytes) / microseconds * 1e-6;
}

}  // namespace conclave::bench
