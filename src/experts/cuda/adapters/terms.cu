#include "cuda/architecture.h"
#include "cuda/device/barrier.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "experts/cuda/adapters/add_terms.cuh"
#include "experts/cuda/adapters/terms.h"
#include "experts/cuda/common/vocabulary.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts {
namespace {

// A cluster makes kTerms terms of the rows of a tile, kRows at a time: its blocks and their warps
// share the columns, in an order that the columns' number alone decides, and a lane has kPart
// neighbours of every 32 of them.
constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
constexpr int kTerms = 16;
constexpr int kRows = 8;
constexpr int kPart = static_cast<int>(kFactorLanes);
constexpr int kColumns = 4 * kPart;  // that two products take

// With so few registers a block has room beside one of a product.
constexpr int kBlocks = 3;

constexpr int32_t kColumnsOfBlock = 1024;
constexpr int32_t kMostBlocks = cuda::kPortableCluster;

struct Parts {
  float warps[kWarps][kTerms][kRows];
  float sums[kTerms * kRows];
};

// The block's place among those that share columns.
struct Share {
  int32_t rank = 0;
  int32_t blocks = 1;
};

// A lane's part of 32 columns, as sums of bf16.
template <class T>
struct Eight {
  static constexpr int kParts = 3;
  float values[kPart] = {};
  __device__ __forceinline__ adapters::SplitPair pair(int i) const {
    return adapters::split_pair({values[2 * i], values[2 * i + 1]});
  }
};
template <>
struct Eight<__nv_bfloat16> {
  static constexpr int kParts = 1;
  uint32_t words[kPart / 2] = {};
  __device__ __forceinline__ adapters::SplitPair pair(int i) const { return {{words[i], 0, 0}}; }
};

__device__ __forceinline__ void load_whole(const __nv_bfloat16* from, Eight<__nv_bfloat16>& to) {
  const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(from));
  to = {{bits.x, bits.y, bits.z, bits.w}};
}
__device__ __forceinline__ void load_whole(const __half* from, Eight<__half>& to) {
  ptx::widen_8<__half>(__ldcg(reinterpret_cast<const uint4*>(from)), to.values);
}
__device__ __forceinline__ void load_whole(const float* from, Eight<float>& to) {
#pragma unroll
  for (int i = 0; i < kPart; i += 4) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(from + i));
    to.values[i] = four.x, to.values[i + 1] = four.y;
    to.values[i + 2] = four.z, to.values[i + 3] = four.w;
  }
}

template <class T>
__device__ __forceinline__ void set(Eight<T>& to, int i, T value) {
  to.values[i] = ptx::widen(value);
}
__device__ __forceinline__ void set(Eight<__nv_bfloat16>& to, int i, __nv_bfloat16 value) {
  to.words[i / 2] |= uint32_t{__bfloat16_as_ushort(value)} << (i % 2 * 16);
}

// Eight neighbours of a row of A, which is filled up to a multiple of them; null has zeros.
template <class F>
__device__ __forceinline__ Eight<F> load_factors(const F* row, int32_t column, int32_t columns) {
  Eight<F> values;
  if (row != nullptr && column < columns) load_whole(row + column, values);
  return values;
}

// Zeros behind the row's end, and where there is no row.
template <class T>
__device__ __forceinline__ Eight<T> load_values(const T* row, int32_t column, int32_t columns) {
  Eight<T> values;
  if (row == nullptr || column >= columns) return values;
  const T* const from = row + column;
  if (column + kPart <= columns && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    load_whole(from, values);
    return values;
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    if (column + i < columns) set(values, i, from[i]);
  }
  return values;
}

// c += A's rows times a row of each token, over 32 columns.
template <class F, class T>
__device__ __forceinline__ void multiply(float (&c)[4], const Eight<F>& low, const Eight<F>& high,
                                         const Eight<T>& values) {
#pragma unroll
  for (int step = 0; step < kPart / 2; step += 2) {
    const adapters::SplitPair a[4] = {low.pair(step), high.pair(step), low.pair(step + 1),
                                      high.pair(step + 1)};
    const adapters::SplitPair b[2] = {values.pair(step), values.pair(step + 1)};
#pragma unroll
    for (int i = 0; i < Eight<F>::kParts; ++i) {
#pragma unroll
      for (int j = 0; j < Eight<T>::kParts && i + j < 3; ++j) {
        ptx::mma_m16n8k16_bf16(c, a[0].parts[i], a[1].parts[i], a[2].parts[i], a[3].parts[i],
                               b[0].parts[j], b[1].parts[j]);
      }
    }
  }
}

// Waits once for the launches before this one.
class Wait {
 public:
  __device__ __forceinline__ void operator()() {
    if (!is_done_) ptx::grid_dependency_wait();
    is_done_ = true;
  }

 private:
  bool is_done_ = false;
};

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The sums of a warp's columns. A comes before the wait, since no launch makes it.
template <class F, class T>
__device__ __forceinline__ void multiply_columns(float (&c)[4], const DeviceFactors& factors,
                                                 const T* row, int32_t columns, int32_t first_term,
                                                 const Share& share, Wait& wait) {
  // Columns of float32 take more registers.
  constexpr int kGroups = Eight<F>::kParts != 1 ? 1 : Eight<T>::kParts != 1 ? 2 : 3;
  constexpr int32_t kStep = kGroups * kColumns;
  const auto lane = static_cast<int32_t>(threadIdx.x % kLanes);
  const int32_t padded = (columns + kPart - 1) / kPart * kPart;
  const F* const low = static_cast<const F*>(factors.a) + int64_t{first_term + lane / 4} * padded;
  const F* const high =
      first_term + kTerms / 2 < factors.terms ? low + int64_t{kTerms / 2} * padded : nullptr;
  const int32_t first = (share.rank * kWarps + static_cast<int32_t>(threadIdx.x / kLanes)) * kStep;
  const int32_t all = share.blocks * kWarps * kStep;
  for (int32_t later = first + all; later < padded; later += all) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int32_t column = later + group * kColumns + lane % 4 * kPart;
      if (column >= padded) break;
      prefetch(low + column);
      if (high != nullptr) prefetch(high + column);
    }
  }
  for (int32_t begin = first; begin < columns; begin += all) {
    const int32_t own = begin + lane % 4 * kPart;
    Eight<F> a[kGroups][2];
    Eight<T> values[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      a[group][0] = load_factors(low, own + group * kColumns, padded);
      a[group][1] = load_factors(high, own + group * kColumns, padded);
    }
    wait();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      values[group] = load_values(row, own + group * kColumns, columns);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      multiply(c, a[group][0], a[group][1], values[group]);
    }
  }
  wait();
}

// The token that lane / 4 names.
template <class T>
struct Token {
  int64_t row = 0;  // sorted
  const DeviceFactors* factors = nullptr;
  const T* values = nullptr;  // null: no factors
};

// These may come before the wait where the launch before this one has waited for the grouping: they
// bypass L1.
template <class T>
__device__ __forceinline__ Token<T> token_of(const TermArgs& args, const TokenTile& tile,
                                             int32_t at) {
  Token<T> token{.row = int64_t{tile.begin} + at};
  if (at >= tile.count) return token;
  const DeviceAdapters& adapters = args.adapters;
  const int32_t slot = __ldcg(args.groups.row_slot + token.row);
  const int32_t number = slot / adapters.slots_per_token;
  const int32_t mark = adapters.marks == nullptr ? adapters.mark : __ldcg(adapters.marks + number);
  if (mark == 0) return token;
  const DeviceExpertFactors& both = adapters.adapters[mark - 1][tile.expert];
  const DeviceFactors* const own =
      args.product == AdaptedProduct::kGateUp ? &both.gate_up : &both.down;
  if (own->terms == 0) return token;
  token.factors = own;
  token.values = static_cast<const T*>(args.source.rows) +
                 (args.source.is_sorted ? token.row : int64_t{number}) * args.source.stride;
  return token;
}

__device__ void store_row(const TermArgs& args, int64_t row, const DeviceFactors* factors) {
  RowFactors own;
  if (factors != nullptr) {
    for (int half = 0; half < 2; ++half) {
      own.b[half] = factors->b[half];
      own.rank[half] = static_cast<int16_t>(factors->rank[half]);
      own.first[half] = static_cast<int16_t>(factors->first[half]);
    }
    own.is_bf16 = factors->is_bf16 ? 1 : 0;
  }
  args.out.rows[row] = own;
}

// The sum of a thread's term and row over all warps; blocks but the first have none.
__device__ __forceinline__ float sum_parts(const float (&c)[4], const Share& share, Parts& parts) {
  const auto lane = static_cast<int32_t>(threadIdx.x % kLanes);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  auto& own = parts.warps[thread / kLanes];
  *reinterpret_cast<float2*>(&own[lane / 4][lane % 4 * 2]) = {c[0], c[1]};
  *reinterpret_cast<float2*>(&own[lane / 4 + 8][lane % 4 * 2]) = {c[2], c[3]};
  __syncthreads();
  float sum = 0;
  if (thread < kTerms * kRows) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += parts.warps[warp][thread % kTerms][thread / kTerms];
    }
  }
  if (share.blocks == 1) {
    __syncthreads();
    return sum;
  }
  if (thread < kTerms * kRows) parts.sums[thread] = sum;
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (share.rank == 0 && thread < kTerms * kRows) {
    for (int32_t rank = 1; rank < share.blocks; ++rank) {
      const auto* const words = reinterpret_cast<const uint32_t*>(parts.sums);
      sum += __uint_as_float(ptx::load_shared_cluster(words + thread, static_cast<uint32_t>(rank)));
    }
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  return sum;
}

// Stores terms of the rows from `first` on that the bits of `lanes` name, four for each.
__device__ __forceinline__ void store_terms(const TermArgs& args, const DeviceFactors& factors,
                                            int64_t first, uint32_t lanes, int32_t first_term,
                                            float sum) {
  const auto token = static_cast<int32_t>(threadIdx.x) / kTerms;
  const int32_t term = first_term + static_cast<int32_t>(threadIdx.x) % kTerms;
  if (token >= kRows || (lanes >> (4 * token) & 1) == 0 || term >= factors.terms) return;
  sum *= factors.scale[term >= factors.first_of_second_scale ? 1 : 0];
  const int64_t row = first + token;
  if (args.source.weights != nullptr) sum *= args.source.weights[args.groups.row_slot[row]];
  args.out.terms[row * args.out.stride + term] = sum;
}

// Tokens of one adapter are multiplied together; a column of a product touches no other, whatever
// the factors are.
template <class T>
__device__ __forceinline__ void make_terms_of(const TermArgs& args, const Token<T>& token,
                                              int64_t first, int32_t first_term, const Share& share,
                                              Wait& wait, Parts& parts) {
  const auto columns = static_cast<int32_t>(args.source.columns);
  uint32_t left = __ballot_sync(0xffffffffU, token.factors != nullptr);
  while (left != 0) {
    const int leader = __ffs(static_cast<int>(left)) - 1;
    const auto* const factors =
        static_cast<const DeviceFactors*>(adapters::shuffle_pointer(token.factors, leader));
    const uint32_t same = __ballot_sync(0xffffffffU, token.factors == factors);
    left &= ~same;
    if (first_term >= factors->terms) continue;
    const T* const row = token.factors == factors ? token.values : nullptr;
    float c[4] = {};
    if (factors->is_bf16) {
      multiply_columns<__nv_bfloat16>(c, *factors, row, columns, first_term, share, wait);
    } else {
      multiply_columns<float>(c, *factors, row, columns, first_term, share, wait);
    }
    const float sum = sum_parts(c, share, parts);
    if (share.rank == 0) store_terms(args, *factors, first, same, first_term, sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    terms_kernel(const TermArgs args, int32_t parts_of_tile, int32_t blocks_of_part) {
  __shared__ __align__(16) Parts parts;
  Wait wait;
  if (!args.groups_are_done) wait();
  // The next launch may load its weights beside this.
  ptx::grid_launch_dependents();
  const auto block = static_cast<int32_t>(blockIdx.x);
  const Share share{.rank = block % blocks_of_part, .blocks = blocks_of_part};
  const int32_t part = block / blocks_of_part % parts_of_tile;
  const int32_t at = block / blocks_of_part / parts_of_tile;
  const int4 found = __ldcg(reinterpret_cast<const int4*>(args.groups.tiles) + at);
  TokenTile tile;
  if (at < __ldcg(args.groups.num_tiles)) {
    tile = {.expert = found.x, .begin = found.y, .count = found.z};
  }
  const auto lane = static_cast<int32_t>(threadIdx.x % kLanes);
  for (int32_t first = 0; first < tile.count; first += kRows) {
    const Token<T> token = token_of<T>(args, tile, first + lane / 4);
    if (part == 0 && share.rank == 0 && threadIdx.x < kLanes && lane % 4 == 0 &&
        first + lane / 4 < tile.count) {
      store_row(args, token.row, token.factors);
    }
    make_terms_of<T>(args, token, int64_t{tile.begin} + first, part * kTerms, share, wait, parts);
  }
  // A launch behind this one relies on all before it being done.
  wait();
}

// Uniform over the process, so that sums have one order.
bool knows_clusters() {
  static const bool all_know = std::ranges::all_of(
      cuda::plain_architectures(),
      [](const cuda::Architecture& code) { return code.capability >= cuda::kFirstWithClusters; });
  return all_know;
}

// Blocks share the columns, so that each has about kColumnsOfBlock.
int32_t blocks_of(int64_t columns) {
  int32_t blocks = 1;
  if (!knows_clusters()) return blocks;
  while (blocks < kMostBlocks && blocks * int64_t{kColumnsOfBlock} < columns) blocks *= 2;
  return blocks;
}

template <class T>
void enqueue(const TermArgs& args, CUstream_st* stream) {
  const int64_t most = std::min<int64_t>(args.adapters.most_terms, args.out.stride);
  const auto parts = static_cast<int32_t>(std::max<int64_t>((most + kTerms - 1) / kTerms, 1));
  const int32_t blocks = blocks_of(args.source.columns);
  cuda::launch("experts.adapter_terms", &terms_kernel<T>,
               {.blocks = args.groups.max_tiles * parts * blocks,
                .threads = kThreads,
                .cluster = blocks,
                .stream = stream},
               args, parts, blocks);
}

}  // namespace

void make_terms(const TermArgs& args, CUstream_st* stream) {
  if (args.groups.max_rows == 0) return;
  switch (args.source.dtype) {
    case DType::kF32:
      return enqueue<float>(args, stream);
    case DType::kF16:
      return enqueue<__half>(args, stream);
    default:
      return enqueue<__nv_bfloat16>(args, stream);
  }
}

}  // namespace conclave::inline v0::experts
