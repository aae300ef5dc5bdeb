// One warp per row, or per group of a row, for the codes of any format.
#include "core/checked.h"
#include "cuda/device/vector16.cuh"
#include "cuda/launch.h"
#include "experts/cuda/common/quantize_rows.h"
#include "experts/cuda/common/vocabulary.h"
#include "quant/activation_rows.h"
#include "quant/code_quotient.h"
#include "quant/formats.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace conclave::inline v0::experts {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;

template <class Codes, class T>
__global__ void __launch_bounds__(kThreads)
    quantize_plain(const QuantizeRowsCuda args, int64_t width, int64_t groups) {
  const int64_t rows =
      args.live_rows == nullptr ? args.num_rows : min(args.num_rows, int64_t{*args.live_rows});
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; item < rows * groups;
       item += warps) {
    const int64_t row = item / groups;
    const int64_t group = item % groups;
    const int64_t begin = group * width;
    const int64_t end = min(args.columns, begin + width);
    const T* const values = static_cast<const T*>(args.rows) + row * args.row_stride;
    float amax = 0;
    bool is_finite = true;
    for (int64_t col = begin + lane; col < end; col += kLanes) {
      const float value = ptx::widen(values[col]);
      amax = fmaxf(amax, fabsf(value));
      is_finite = is_finite && isfinite(value);
    }
    for (int step = kLanes / 2; step > 0; step /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, step));
    }
    is_finite = __all_sync(0xffffffffU, is_finite) != 0;
    const bool is_static = args.activations == ActivationScale::kTensorStatic;
    float scale =
        is_static ? *args.static_scale : quant::step_of(amax, Codes::kLargest, args.power_of_two);
    if (!Codes::kHasNan && !is_finite) scale = NAN;
    for (int32_t copy = 0; copy < args.top_k; ++copy) {
      const int64_t target =
          args.slot_row == nullptr ? row : int64_t{args.slot_row[row * args.top_k + copy]};
      if (target < 0) continue;
      if (lane == 0 && !is_static) {
        args.scales[target * args.scale_stride + group * args.group_stride] = scale;
      }
      for (int64_t col = begin + lane; col < end; col += kLanes) {
        args.codes[target * args.code_stride + col] =
            quant::row_code<Codes>(ptx::widen(values[col]), scale);
      }
    }
  }
}

template <class Codes, class T>
void enqueue(const QuantizeRowsCuda& args, CUstream_st* stream) {
  constexpr int64_t kMostBlocks = 1 << 16;
  const int64_t width = quant::scale_width(args.activations, args.columns);
  const int64_t groups = ceil_div(args.columns, width);
  const int64_t wanted = ceil_div(args.num_rows * groups, int64_t{kWarps});
  cuda::launch("experts.quantize_plain", &quantize_plain<Codes, T>,
               {.blocks = std::min(wanted, kMostBlocks),
                .threads = kThreads,
                .overlap = cuda::Overlap::kNone,
                .stream = stream},
               args, width, groups);
}

template <class Codes>
void enqueue_as(const QuantizeRowsCuda& args, CUstream_st* stream) {
  switch (args.dtype) {
    case DType::kF32:
      return enqueue<Codes, float>(args, stream);
    case DType::kF16:
      return enqueue<Codes, __half>(args, stream);
    default:
      return enqueue<Codes, __nv_bfloat16>(args, stream);
  }
}

// Rows become codes of formats that are rows of their own only.
template <class Format>
void enqueue_if(const QuantizeRowsCuda& args, CUstream_st* stream) {
  if constexpr (std::is_same_v<Format, typename Format::Rows>) {
    if (args.code_dtype == Format::kElement) enqueue_as<Format>(args, stream);
  }
}

template <class... Formats>
void enqueue_codes(const QuantizeRowsCuda& args, CUstream_st* stream,
                   quant::FormatList<Formats...>) {
  (enqueue_if<Formats>(args, stream), ...);
}

}  // namespace

void quantize_rows_plain(const QuantizeRowsCuda& args, CUstream_st* stream) {
  if (args.num_rows == 0 || args.columns == 0) return;
  enqueue_codes(args, stream, quant::CodedFormats{});
}

}  // namespace conclave::inline v0::experts
