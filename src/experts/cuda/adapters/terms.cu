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

// The expert of a sorted row: threads look at one expert each, since steps that wait for one
// another would take as long as the terms of few rows. Experts without rows hold none.
__device__ __forceinline__ int32_t expert_of(const TermArgs& args, int64_t row) {
  __shared__ int32_t found;
  const auto experts = static_cast<int32_t>(args.num_experts);
  for (int32_t expert = static_cast<int32_t>(threadIdx.x); expert < experts; expert += kThreads) {
    if (args.groups.expert_begin[expert] <= row && row < args.groups.expert_begin[expert + 1]) {
      found = expert;
    }
  }
  __syncthreads();
  return found;
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

// A block makes kTerms terms of one row: its warps each have a part of the columns, in an order
// that nothing else changes.
template <class T>
__global__ void __launch_bounds__(kThreads)
    terms_kernel(const TermArgs args, int32_t blocks_of_row) {
  ptx::grid_dependency_wait();
  // What comes next may load its weights beside this.
  ptx::grid_launch_dependents();
  const int64_t row = blockIdx.x / blocks_of_row;
  const auto part = static_cast<int32_t>(blockIdx.x % blocks_of_row);
  if (row >= args.groups.expert_begin[args.num_experts]) return;
  const int32_t slot = args.groups.row_slot[row];
  const DeviceFactors* const factors = factors_of(args, expert_of(args, row), slot);
  if (part == 0 && threadIdx.x == 0) store_row(args, row, factors);
  const int32_t first = part * kTerms;
  if (factors == nullptr || first >= factors->terms) return;
  const int64_t columns = args.source.columns;
  const int64_t padded = (columns + kPart - 1) / kPart * kPart;
  const int64_t source_row =
      args.source.is_sorted ? row : int64_t{slot / args.adapters.slots_per_token};
  const T* const values = static_cast<const T*>(args.source.rows) + source_row * args.source.stride;
  const void* const a = factors->a;
  const bool is_bf16 = factors->is_bf16;
  float sums[kTerms] = {};
  for (int64_t column = int64_t{threadIdx.x} * kPart; column < columns; column += kStep) {
    float x[kPart];
    load_values(values, column, columns, x);
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      float weights[kPart];
      adapters::load_eight(a, (first + term) * padded + column, is_bf16, weights);
#pragma unroll
      for (int i = 0; i < kPart; ++i) sums[term] = fmaf(weights[i], x[i], sums[term]);
    }
  }
  __shared__ float parts[kTerms][kWarps];
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sums[term] += __shfl_xor_sync(0xffffffffU, sums[term], step);
    }
    if (threadIdx.x % kLanes == 0) parts[term][threadIdx.x / kLanes] = sums[term];
  }
  __syncthreads();
  if (threadIdx.x >= kTerms) return;
  const int32_t term = first + static_cast<int32_t>(threadIdx.x);
  float sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += parts[threadIdx.x][warp];
  sum *= factors->scale[term >= factors->first_of_second_scale ? 1 : 0];
  if (args.source.weights != nullptr) sum *= args.source.weights[slot];
  args.out.terms[row * args.out.stride + term] = sum;
}

template <class T>
void enqueue(const TermArgs& args, CUstream_st* stream) {
  // Terms of a product are a multiple of kTerms, since ranks are.
  static_assert(kFactorLanes % kTerms == 0);
  const int32_t blocks = std::max(args.adapters.most_terms / kTerms, 1);
  cuda::launch("experts.adapter_terms", &terms_kernel<T>,
               {.blocks = args.groups.max_rows * blocks, .threads = kThreads, .stream = stream},
               args, blocks);
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
