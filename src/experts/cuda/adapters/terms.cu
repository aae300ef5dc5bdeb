#include "core/checked.h"
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

constexpr int kLanes = 32;
constexpr int kWarps = 8;  // share the columns of a block's terms
constexpr int kThreads = kWarps * kLanes;
constexpr int kTerms = 4;  // terms of a block
constexpr int kPart = static_cast<int>(kFactorLanes);
constexpr int64_t kStep = int64_t{kThreads} * kPart;  // columns that a block multiplies at a time

// The experts of a block's rows: threads look at one expert each, since steps that wait for one
// another would take as long as the terms of few rows. Experts without rows hold none.
template <int kRows>
__device__ __forceinline__ void find_experts(const TermArgs& args, int64_t first, int32_t count,
                                             int32_t (&found)[kRows]) {
  const auto experts = static_cast<int32_t>(args.num_experts);
  for (int32_t expert = static_cast<int32_t>(threadIdx.x); expert < experts; expert += kThreads) {
    const int32_t begin = args.groups.expert_begin[expert];
    const int32_t end = args.groups.expert_begin[expert + 1];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row < count && begin <= first + row && first + row < end) found[row] = expert;
    }
  }
  __syncthreads();
}

// The factors of a sorted row, or null.
__device__ const DeviceFactors* factors_of(const TermArgs& args, int32_t expert, int32_t slot) {
  const DeviceAdapters& adapters = args.adapters;
  const int32_t mark =
      adapters.marks == nullptr ? adapters.mark : adapters.marks[slot / adapters.slots_per_token];
  if (mark == 0) return nullptr;
  const DeviceExpertFactors& both = adapters.adapters[mark - 1][expert];
  const DeviceFactors* const own =
      args.product == AdaptedProduct::kGateUp ? &both.gate_up : &both.down;
  return own->terms == 0 ? nullptr : own;
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

// Eight values of a row; zeros behind its end.
template <class T>
__device__ __forceinline__ void load_values(const T* row, int64_t column, int64_t columns,
                                            float (&values)[kPart]) {
  const T* const from = row + column;
  if (column + kPart <= columns && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    return ptx::load_8(from, values);
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    values[i] = column + i < columns ? ptx::widen(from[i]) : 0.0F;
  }
}

// Neighbouring rows of a block that have one expert and one adapter.
template <class T, int kRows>
struct Run {
  const T* values[kRows] = {};
  int64_t first = 0;  // sorted row
  int32_t count = 0;
};

// Registers have no index that is known late.
template <class T, int kRows>
__device__ __forceinline__ void add_row(Run<T, kRows>& run, const T* values) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row != run.count) continue;
    run.values[row] = values;
  }
  ++run.count;
}

// Makes kTerms terms of each row: warps each have a part of the columns, in an order that nothing
// else changes.
template <class T, int kRows>
__device__ __forceinline__ void make_terms_of(const TermArgs& args, const DeviceFactors& factors,
                                              const Run<T, kRows>& run, int32_t first_term,
                                              float (&parts)[kRows][kTerms][kWarps]) {
  const int64_t columns = args.source.columns;
  const int64_t padded = (columns + kPart - 1) / kPart * kPart;
  float sums[kRows][kTerms] = {};
  for (int64_t column = int64_t{threadIdx.x} * kPart; column < columns; column += kStep) {
    float a[kTerms][kPart];
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      adapters::load_eight(factors.a, (first_term + term) * padded + column, factors.is_bf16,
                           a[term]);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= run.count) break;
      float x[kPart];
      load_values(run.values[row], column, columns, x);
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) sums[row][term] = fmaf(a[term][i], x[i], sums[row][term]);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= run.count) break;
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      float sum = sums[row][term];
      for (int step = kLanes / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffU, sum, step);
      }
      if (threadIdx.x % kLanes == 0) parts[row][term][threadIdx.x / kLanes] = sum;
    }
  }
  __syncthreads();
  const auto row = static_cast<int32_t>(threadIdx.x) / kTerms;
  const auto own = static_cast<int32_t>(threadIdx.x) % kTerms;
  if (row < run.count) {
    float sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += parts[row][own][warp];
    const int32_t term = first_term + own;
    sum *= factors.scale[term >= factors.first_of_second_scale ? 1 : 0];
    if (args.source.weights != nullptr)
      sum *= args.source.weights[args.groups.row_slot[run.first + row]];
    args.out.terms[(run.first + row) * args.out.stride + term] = sum;
  }
  __syncthreads();
}

// A block makes kTerms terms of kRows neighbouring rows, which read A once where they have one
// expert and one adapter.
template <class T, int kRows>
__global__ void __launch_bounds__(kThreads)
    terms_kernel(const TermArgs args, int32_t blocks_of_row) {
  __shared__ int32_t experts[kRows];
  __shared__ float parts[kRows][kTerms][kWarps];
  ptx::grid_dependency_wait();
  // The next launch may load its weights beside this.
  ptx::grid_launch_dependents();
  const int64_t begin = blockIdx.x / blocks_of_row * int64_t{kRows};
  const auto part = static_cast<int32_t>(blockIdx.x % blocks_of_row);
  const int64_t rows = args.groups.expert_begin[args.num_experts];
  if (begin >= rows) return;
  const auto count = static_cast<int32_t>(min(int64_t{kRows}, rows - begin));
  find_experts<kRows>(args, begin, count, experts);
  const int32_t first_term = part * kTerms;
  Run<T, kRows> run;
  const DeviceFactors* before = nullptr;
  const auto finish = [&] {
    if (run.count > 0 && first_term < before->terms) {
      make_terms_of(args, *before, run, first_term, parts);
    }
    run.count = 0;
  };
  for (int32_t i = 0; i < count; ++i) {
    const int64_t row = begin + i;
    const int32_t slot = args.groups.row_slot[row];
    const DeviceFactors* const factors = factors_of(args, experts[i], slot);
    if (part == 0 && threadIdx.x == 0) store_row(args, row, factors);
    if (factors != before) finish();
    before = factors;
    if (factors == nullptr) continue;
    if (run.count == 0) run.first = row;
    const int64_t source =
        args.source.is_sorted ? row : int64_t{slot / args.adapters.slots_per_token};
    add_row(run, static_cast<const T*>(args.source.rows) + source * args.source.stride);
  }
  finish();
}

template <class T, int kRows>
void enqueue_rows(const TermArgs& args, CUstream_st* stream) {
  // Terms of a product are a multiple of kTerms, since ranks are.
  static_assert(kFactorLanes % kTerms == 0);
  const int32_t blocks = std::max(args.adapters.most_terms / kTerms, 1);
  cuda::launch("experts.adapter_terms", &terms_kernel<T, kRows>,
               {.blocks = ceil_div(args.groups.max_rows, int64_t{kRows}) * blocks,
                .threads = kThreads,
                .stream = stream},
               args, blocks);
}

template <class T>
void enqueue(const TermArgs& args, CUstream_st* stream) {
  // With fewer rows an expert, most neighbours have other experts.
  constexpr int64_t kManyRows = 4;
  if (args.groups.max_rows >= kManyRows * args.num_experts) {
    enqueue_rows<T, 4>(args, stream);
  } else {
    enqueue_rows<T, 1>(args, stream);
  }
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
