#include "core/checked.h"
#include "cuda/device/grid.cuh"
#include "cuda/launch.h"
#include "gemm/cuda/gate_product.h"
#include "gemm/cuda/gate_staged.cuh"
#include "gemm/cuda/gate_tile.cuh"

#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace conclave::inline v0::gemm {
namespace {

using device::kSegments;
using device::kTileLogits;
using device::kTileTokens;

// For few tokens: a block takes some tiles and each of its warps one segment, so that many warps
// read the weights at once.
template <class X, class W, int kTokenTiles, int kLogitTiles, int kUnroll>
__global__ void __launch_bounds__(kSegments * 32)
    few_tokens_kernel(const __grid_constant__ device::GateParams<X, W> params,
                      int64_t token_blocks) {
  constexpr int kNumbers = kTokenTiles * kLogitTiles * 4;  // per lane
  extern __shared__ float partial[];                       // [kSegments, kNumbers, 32]
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const int64_t first_token = blockIdx.x % token_blocks * (kTokenTiles * kTileTokens);
  const int64_t first_logit = blockIdx.x / token_blocks * (kLogitTiles * kTileLogits);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  device::Accumulators<kLogitTiles> sums[kTokenTiles];
  device::sum_segment<X, W, kTokenTiles, kLogitTiles, kUnroll>(params, first_token, first_logit,
                                                               warp, sums);
#pragma unroll
  for (int number = 0; number < kNumbers; ++number) {
    partial[(warp * kNumbers + number) * 32 + lane] =
        sums[number / 4 / kLogitTiles].values[number / 4 % kLogitTiles][number % 4];
  }
  __syncthreads();
  // Each warp adds up one number at a time, over segments in ascending order.
  for (int number = warp; number < kNumbers; number += kSegments) {
    float sum = 0;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) sum += partial[(s * kNumbers + number) * 32 + lane];
    const int tile = number / 4;
    device::store_logit(
        params, device::token_of(first_token + tile / kLogitTiles * kTileTokens, number % 4),
        device::logit_of(first_logit + tile % kLogitTiles * kTileLogits, number % 4), sum);
  }
}

// Every kernel may use this much without asking.
constexpr size_t kDefaultSharedBytes = size_t{48} * 1024;

template <int kTokenTiles, int kLogitTiles>
constexpr size_t kPartialBytes =
    size_t{kSegments} * kTokenTiles * kLogitTiles * 4 * 32 * sizeof(float);

// Tiles of logits in kSomeTokens.
template <class X, class W>
constexpr int kSomeLogitTiles = device::kPieces<X> == 1 && device::kPieces<W> == 1 ? 4 : 2;

template <class X, class W, int kTokenTiles, int kLogitTiles, int kUnroll>
void prepare_few() {
  constexpr size_t kBytes = kPartialBytes<kTokenTiles, kLogitTiles>;
  if (kBytes <= kDefaultSharedBytes) return;
  const auto kernel = few_tokens_kernel<X, W, kTokenTiles, kLogitTiles, kUnroll>;
  cuda::allow_shared_bytes(reinterpret_cast<const void*>(kernel), kBytes);
}

template <class X, class W, int kTokenTiles, int kLogitTiles, int kUnroll>
void run_few(const device::GateParams<X, W>& params, CUstream_st* stream) {
  const auto kernel = few_tokens_kernel<X, W, kTokenTiles, kLogitTiles, kUnroll>;
  const int64_t blocks = ceil_div(params.rows.count, kTokenTiles * kTileTokens);
  cuda::launch("gemm.gate_few_tokens", kernel,
               {.blocks = blocks * ceil_div(params.weights.count, kLogitTiles * kTileLogits),
                .threads = kSegments * 32,
                .shared_bytes = kPartialBytes<kTokenTiles, kLogitTiles>,
                .stream = stream},
               params, blocks);
}

template <class X, class W>
__global__ void __launch_bounds__(device::StagedTile<X, W>::kThreads)
    many_tokens_kernel(const __grid_constant__ device::GateParams<X, W> params,
                       int64_t token_blocks) {
  using Config = device::StagedConfig<X, W>;
  extern __shared__ __align__(128) std::byte memory[];
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const device::StagedTile<X, W> tile{params, memory, blockIdx.x % token_blocks * Config::kTokens,
                                      blockIdx.x / token_blocks * Config::kLogits};
  device::Accumulators<Config::kLogitTiles> totals[2];
  tile.sum(totals);
  const int64_t token = tile.first_token + threadIdx.x / 32 * (2 * kTileTokens);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kLogitTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        device::store_logit(params, device::token_of(token + m * kTileTokens, i),
                            device::logit_of(tile.first_logit + n * kTileLogits, i),
                            totals[m].values[n][i]);
      }
    }
  }
}

constexpr int kNormThreads = 256;

// One token per block: x / sqrt(mean(x^2) + epsilon) * weight * H^-0.5, rounded once per element.
template <class X>
__global__ void __launch_bounds__(kNormThreads)
    norm_kernel(const __grid_constant__ device::Rows<X> rows, const float* weight, double epsilon,
                float* out, int64_t out_stride) {
  __shared__ double partial[kNormThreads];
  cuda::device::grid_dependency_wait();
  cuda::device::grid_launch_dependents();
  const X* row = rows.data + blockIdx.x * rows.stride;
  double squares = 0;
  for (int64_t c = threadIdx.x; c < rows.columns; c += kNormThreads) {
    const auto value = static_cast<double>(cuda::device::widen(row[c]));
    squares += value * value;
  }
  partial[threadIdx.x] = squares;
  __syncthreads();
  for (unsigned half = kNormThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  const auto width = static_cast<double>(rows.columns);
  const double factor = 1.0 / (sqrt(partial[0] / width + epsilon) * sqrt(width));
  for (int64_t c = threadIdx.x; c < rows.columns; c += kNormThreads) {
    const auto value = static_cast<double>(cuda::device::widen(row[c]));
    out[blockIdx.x * out_stride + c] =
        static_cast<float>(value * factor * static_cast<double>(weight[c]));
  }
}

template <class T>
device::Rows<T> rows_of(const void* data, int64_t stride, int64_t count, int64_t columns) {
  const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
                       stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
  return {static_cast<const T*>(data), stride, count, columns, aligned};
}

template <class X, class W>
void prepare(GateKernel kernel) {
  if (kernel == GateKernel::kFewTokens) return prepare_few<X, W, 1, 1, 8>();
  prepare_few<X, W, 2, kSomeLogitTiles<X, W>, 2>();
  if (kernel != GateKernel::kManyTokens) return;
  cuda::allow_shared_bytes(reinterpret_cast<const void*>(many_tokens_kernel<X, W>),
                           device::StagedConfig<X, W>::kSharedBytes);
}

template <class W>
void prepare_weights(GateKernel kernel) {
  prepare<float, W>(kernel);
  prepare<__half, W>(kernel);
  prepare<__nv_bfloat16, W>(kernel);
}

template <class X, class W>
void run(const DeviceGateArgs& args, const device::Rows<X>& rows, GateKernel kernel,
         CUstream_st* stream) {
  const device::GateParams<X, W> params{
      .rows = rows,
      .weights = rows_of<W>(args.weights, args.weights_stride, args.num_logits, args.hidden_size),
      .bias = args.bias,
      .logits_dtype = args.logits_dtype,
      .logits = args.logits};
  // Copies of 16 bytes need rows that begin at multiples of 16 bytes.
  const bool staged_fits = params.rows.aligned && params.weights.aligned;
  if (kernel != GateKernel::kManyTokens || !staged_fits) {
    if (kernel == GateKernel::kFewTokens) return run_few<X, W, 1, 1, 8>(params, stream);
    return run_few<X, W, 2, kSomeLogitTiles<X, W>, 2>(params, stream);
  }
  using Config = device::StagedConfig<X, W>;
  static_assert(Config::kSharedBytes <= kManyTokensSharedBytes);
  const auto staged = many_tokens_kernel<X, W>;
  const int64_t blocks = ceil_div(args.num_tokens, Config::kTokens);
  cuda::launch("gemm.gate_many_tokens", staged,
               {.blocks = blocks * ceil_div(args.num_logits, Config::kLogits),
                .threads = device::StagedTile<X, W>::kThreads,
                .shared_bytes = Config::kSharedBytes,
                .stream = stream},
               params, blocks);
}

template <class X>
void run_rows(const DeviceGateArgs& args, const device::Rows<X>& rows, GateKernel kernel,
              CUstream_st* stream) {
  switch (args.weights_dtype) {
    case DType::kF32:
      return run<X, float>(args, rows, kernel, stream);
    case DType::kF16:
      return run<X, __half>(args, rows, kernel, stream);
    default:
      return run<X, __nv_bfloat16>(args, rows, kernel, stream);
  }
}

int64_t normed_stride(int64_t hidden_size) { return round_up(hidden_size, 4); }

template <class X>
void norm_and_run(const DeviceGateArgs& args, GateKernel kernel, CUstream_st* stream) {
  const auto rows = rows_of<X>(args.rows, args.rows_stride, args.num_tokens, args.hidden_size);
  if (args.norm_weight == nullptr) return run_rows(args, rows, kernel, stream);
  auto* normed = static_cast<float*>(args.workspace);
  const int64_t stride = normed_stride(args.hidden_size);
  cuda::launch("gemm.gate_norm", norm_kernel<X>,
               {.blocks = args.num_tokens, .threads = kNormThreads, .stream = stream}, rows,
               args.norm_weight, args.norm_epsilon, normed, stride);
  run_rows(args, rows_of<float>(normed, stride, args.num_tokens, args.hidden_size), kernel, stream);
}

void check_type(const char* field, DType dtype) {
  if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16) return;
  throw Error(ErrorCode::kDType, {.what = "the gate product takes float types",
                                  .tensor = field,
                                  .expected = "F32, F16 or BF16",
                                  .found = std::string(to_string(dtype))});
}

}  // namespace

size_t device_gate_workspace_bytes(int64_t max_tokens, int64_t hidden_size, bool has_norm) {
  if (!has_norm) return 0;
  return static_cast<size_t>(max_tokens) * static_cast<size_t>(normed_stride(hidden_size)) *
         sizeof(float);
}

void prepare_gate_product(GateKernel kernel, DType weights_dtype) {
  check_type("weights", weights_dtype);
  switch (weights_dtype) {
    case DType::kF32:
      return prepare_weights<float>(kernel);
    case DType::kF16:
      return prepare_weights<__half>(kernel);
    default:
      return prepare_weights<__nv_bfloat16>(kernel);
  }
}

void device_gate_product(const DeviceGateArgs& args, GateKernel kernel, CUstream_st* stream) {
  check_type("rows", args.rows_dtype);
  check_type("weights", args.weights_dtype);
  check_type("logits", args.logits_dtype);
  if (args.num_tokens == 0 || args.num_logits == 0) return;
  switch (args.rows_dtype) {
    case DType::kF32:
      return norm_and_run<float>(args, kernel, stream);
    case DType::kF16:
      return norm_and_run<__half>(args, kernel, stream);
    default:
      return norm_and_run<__nv_bfloat16>(args, kernel, stream);
  }
}

}  // namespace conclave::inline v0::gemm
