#include "cuda/launch.h"
#include "experts/cuda/common/arrange_codes.h"

#include <algorithm>

namespace conclave::inline v0::experts {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 4096;
constexpr int kWords = static_cast<int>(kLaneColumns) / 8;

// A thread has the codes of 64 columns at a time.
template <CodeOrder kOrder>
__global__ void arrange(uint4* codes, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const uint4 first = codes[2 * i];
    const uint4 second = codes[2 * i + 1];
    const uint32_t stored[kWords] = {first.x,  first.y,  first.z,  first.w,
                                     second.x, second.y, second.z, second.w};
    uint32_t words[kWords] = {};
#pragma unroll
    for (int column = 0; column < kLaneColumns; ++column) {
      const LanePlace place = lane_place(column);
      words[place.word] |= lane_bits<kOrder>(place, stored[column / 8] >> (column % 8 * 4) & 0xfU);
    }
    codes[2 * i] = make_uint4(words[0], words[1], words[2], words[3]);
    codes[2 * i + 1] = make_uint4(words[4], words[5], words[6], words[7]);
  }
}

__global__ void arrange_small(uint4* codes, int64_t count) {
  constexpr int kSmallWords = static_cast<int>(kLaneColumns / kSmallWordColumns);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const uint4 all = codes[i];
    const uint32_t stored[kSmallWords] = {all.x, all.y, all.z, all.w};
    uint32_t words[kSmallWords] = {};
#pragma unroll
    for (int column = 0; column < kLaneColumns; ++column) {
      const uint32_t code =
          stored[column / kSmallWordColumns] >> (column % kSmallWordColumns * 2) & 3U;
      words[small_lane_word(column)] |= code << small_lane_bit(column);
    }
    codes[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

using Kernel = void (*)(uint4*, int64_t);
Kernel kernel_of(CodeOrder order) {
  switch (order) {
    case CodeOrder::kLanesOfFloats:
      return arrange<CodeOrder::kLanesOfFloats>;
    case CodeOrder::kLanesOfNumbers:
      return arrange<CodeOrder::kLanesOfNumbers>;
    case CodeOrder::kLanesOfSmallNumbers:
      return arrange_small;
    default:
      return arrange<CodeOrder::kLanesOfPairs>;
  }
}

}  // namespace

void arrange_codes(void* codes, int64_t rows, int64_t row_bytes, CodeOrder order,
                   CUstream_st* stream) {
  if (order == CodeOrder::kStored) return;
  const int64_t count = rows * (row_bytes / (kLaneColumns * code_bits(order, 4) / 8));
  if (count == 0) return;
  cuda::launch("experts.arrange_codes", kernel_of(order),
               {.blocks = std::min<int64_t>((count + kThreads - 1) / kThreads, kMostBlocks),
                .threads = kThreads,
                .overlap = cuda::Overlap::kNone,
                .stream = stream},
               static_cast<uint4*>(codes), count);
}

}  // namespace conclave::inline v0::experts
