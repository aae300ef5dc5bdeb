#include "activation/device/formulas.cuh"
#include "core/code_bits.h"
#include "core/weight_types.h"
#include "cuda/check.h"
#include "cuda/launch.h"
#include "experts/cuda/adapters/add_terms.cuh"
#include "experts/cuda/adapters/terms.h"
#include "experts/cuda/common/round_rows.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/lane_codes.h"
#include "experts/cuda/reference/reference.h"
#include "quant/activation_rows.h"
#include "quant/code_quotient.h"
#include "quant/formats.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace conclave::inline v0::experts::detail {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarpsPerBlock = kThreads / kLanes;

// A matrix of one expert, or rows of activations, element by element.
struct Matrix {
  const void* data = nullptr;
  int64_t stride = 0;  // elements
  DType dtype = DType::kBF16;
  int64_t bits = 16;
  CodeOrder order = CodeOrder::kStored;
  int64_t term_columns = 0;  // OwnRowForm has it: values of bf16 are sums of two terms
  // The stored code of 0, for CodeOrder::kLanesOfSmallNumbers.
  int32_t code_of_zero = 0;
  // Scale of element (row, col): scales[row / scale_rows * scale_stride + col / scale_cols].
  const float* scales = nullptr;
  const float* offsets = nullptr;  // what is taken from products, like the scales; or null
  int64_t scale_rows = 1;
  int64_t scale_cols = 1;
  int64_t scale_stride = 1;
};

// Calls visit(format) for the format of this type among those of codes.
template <class Visit, class... Formats>
__device__ void visit_format(DType element, quant::FormatList<Formats...>, const Visit& visit) {
  ((element == Formats::kElement ? visit(Formats{}) : void()), ...);
}

// Rows have half of the elements that they have columns, in blocks.
__device__ uint8_t load_small_code(const Matrix& matrix, int64_t row, int64_t col) {
  constexpr int64_t kWordsOfBlock = kLaneColumns / kSmallWordColumns;
  const auto of_block = static_cast<int32_t>(col % kLaneColumns);
  const auto* const words = static_cast<const uint32_t*>(matrix.data) + row * matrix.stride / 8 +
                            col / kLaneColumns * kWordsOfBlock;
  const uint32_t code = words[small_lane_word(of_block)] >> small_lane_bit(of_block) & 3U;
  return static_cast<uint8_t>(static_cast<int32_t>(code) + matrix.code_of_zero);
}

__device__ uint8_t load_code(const Matrix& matrix, int64_t row, int64_t col, int64_t bits) {
  const int64_t index = row * matrix.stride + col;
  if (matrix.order == CodeOrder::kStored) {
    return code_at(static_cast<const std::byte*>(matrix.data), index, bits);
  }
  if (matrix.order == CodeOrder::kLanesOfSmallNumbers) return load_small_code(matrix, row, col);
  const LanePlace place = lane_place(static_cast<int32_t>(col % kLaneColumns));
  const auto* const words = static_cast<const uint32_t*>(matrix.data) + (index - col) / 8 +
                            col / kLaneColumns * (kLaneColumns / 8);
  const uint32_t word = words[place.word];
  switch (matrix.order) {
    case CodeOrder::kLanesOfFloats:
      return static_cast<uint8_t>(lane_code<CodeOrder::kLanesOfFloats>(place, word));
    case CodeOrder::kLanesOfNumbers:
      return static_cast<uint8_t>(lane_code<CodeOrder::kLanesOfNumbers>(place, word));
    default:
      return static_cast<uint8_t>(lane_code<CodeOrder::kLanesOfPairs>(place, word));
  }
}

__device__ float load_bf16(const Matrix& matrix, int64_t row, int64_t col) {
  const auto* const values = static_cast<const __nv_bfloat16*>(matrix.data) + row * matrix.stride;
  const int64_t part = matrix.term_columns;
  if (part == 0) return __bfloat162float(values[col]);
  const auto* const first = values + col / part * 2 * part + col % part;
  return __bfloat162float(first[0]) + __bfloat162float(first[part]);
}

__device__ float load_element(const Matrix& matrix, int64_t row, int64_t col) {
  const int64_t index = row * matrix.stride + col;
  switch (matrix.dtype) {
    case DType::kF32:
      return static_cast<const float*>(matrix.data)[index];
    case DType::kF16:
      return __half2float(static_cast<const __half*>(matrix.data)[index]);
    case DType::kBF16:
      return load_bf16(matrix, row, col);
    default:
      break;
  }
  float value = 0;
  visit_format(matrix.dtype, quant::CodedFormats{}, [&](auto format) {
    value = format.decode(load_code(matrix, row, col, format.kBits));
  });
  return value;
}

__device__ float load_scaled(const Matrix& matrix, int64_t row, int64_t col) {
  const float value = load_element(matrix, row, col);
  if (matrix.scales == nullptr) return value;
  const int64_t place = row / matrix.scale_rows * matrix.scale_stride + col / matrix.scale_cols;
  if (matrix.offsets == nullptr) return value * matrix.scales[place];
  return fmaf(value, matrix.scales[place], -matrix.offsets[place]);
}

__device__ void store_element(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[index] = value;
      return;
    case DType::kF16:
      static_cast<__half*>(data)[index] = __float2half_rn(value);
      return;
    default:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
  }
}

// Every lane gets the dot product of a weight row and an input row.
__device__ float warp_dot(const Matrix& weights, int64_t feature, const Matrix& input, int64_t row,
                          int64_t depth) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float sum = 0;
  for (int64_t col = lane; col < depth; col += kLanes) {
    sum = fmaf(load_scaled(weights, feature, col), load_scaled(input, row, col), sum);
  }
  for (int step = kLanes / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, step);
  }
  return sum;
}

struct ReferenceParams {
  int64_t num_experts = 0;
  int64_t input_columns = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  activation::DeviceActivation activation;
  Matrix gate_up;  // expert 0's; further ones follow at the strides below
  Matrix down;
  int64_t gate_up_elements = 0;  // from expert to expert
  int64_t down_elements = 0;
  int64_t gate_up_scales = 0;
  int64_t down_scales = 0;
  const float* gate_up_bias = nullptr;
  const float* down_bias = nullptr;
  const float* column_factors = nullptr;  // [E, I] for activated rows; or null
  Matrix input;
  const int32_t* expert_begin = nullptr;
  const int32_t* row_slot = nullptr;
  int32_t top_k = 1;
  const float* input_weights = nullptr;
  float* intermediate = nullptr;   // [rows, I]
  DType row_codes = DType::kBF16;  // what rows become whose groups have float32 scales
  bool power_of_two = false;
  void* output = nullptr;
  int64_t output_stride = 0;
  DType output_dtype = DType::kBF16;
  // For kernels that add what adapters contribute to gate and up, and to down.
  AdapterTerms up_terms;
  AdapterTerms down_terms;
};

// A product's sum and what the row's adapter adds to it.
template <bool kAdapts>
__device__ float with_terms(float sum, const AdapterTerms& terms, int64_t row, int half,
                            int64_t feature) {
  if constexpr (kAdapts) {
    const RowFactors factors = terms.rows[row];
    if (factors.rank[half] == 0) return sum;
    sum += adapters::delta_of(factors, half, feature, terms.terms + row * terms.stride);
  }
  return sum;
}

// Bytes of elements that fill whole ones.
__device__ int64_t bytes_of(const Matrix& matrix, int64_t elements) {
  return elements * matrix.bits / 8;
}

__device__ void skip_scales(Matrix& matrix, int64_t count) {
  if (matrix.scales != nullptr) matrix.scales += count;
  if (matrix.offsets != nullptr) matrix.offsets += count;
}

__device__ Matrix of_expert(const Matrix& all, int64_t expert, int64_t elements, int64_t scales) {
  Matrix one = all;
  one.data = static_cast<const char*>(all.data) + bytes_of(all, expert * elements);
  skip_scales(one, expert * scales);
  return one;
}

// The expert whose rows hold `row`: the last that begins at or before it and is not empty.
__device__ int64_t expert_of(const ReferenceParams& params, int64_t row) {
  int64_t low = 0;
  int64_t high = params.num_experts;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (params.expert_begin[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <bool kAdapts>
__global__ void __launch_bounds__(kThreads)
    reference_up(const __grid_constant__ ReferenceParams params) {
  const int64_t rows = params.expert_begin[params.num_experts];
  const int64_t inner = params.intermediate_size;
  const int64_t warps = int64_t{gridDim.x} * kWarpsPerBlock;
  const bool gated = params.activation.gated;
  for (int64_t item = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kLanes;
       item < rows * inner; item += warps) {
    const int64_t row = item / inner;
    const int64_t feature = item % inner;
    const int64_t expert = expert_of(params, row);
    const int32_t slot = params.row_slot[row];
    const int64_t token = slot / params.top_k;
    const Matrix weights =
        of_expert(params.gate_up, expert, params.gate_up_elements, params.gate_up_scales);
    const float factor = params.input_weights != nullptr ? params.input_weights[slot] : 1.0F;
    // The up half begins with a scale block of its own, even if I is no multiple of a block's rows.
    Matrix up_weights = weights;
    up_weights.data = static_cast<const char*>(weights.data) +
                      (gated ? bytes_of(weights, inner * weights.stride) : 0);
    if (gated) {
      skip_scales(up_weights,
                  (inner + weights.scale_rows - 1) / weights.scale_rows * weights.scale_stride);
    }
    const float* bias = params.gate_up_bias == nullptr
                            ? nullptr
                            : params.gate_up_bias + expert * (gated ? 2 : 1) * inner;
    float gate = 0;
    if (gated) {
      const float sum = warp_dot(weights, feature, params.input, token, params.input_columns);
      gate = factor * with_terms<kAdapts>(sum, params.up_terms, row, 0, feature);
      if (bias != nullptr) gate += bias[feature];
    }
    const float sum = warp_dot(up_weights, feature, params.input, token, params.input_columns);
    float up = factor * with_terms<kAdapts>(sum, params.up_terms, row, 1, feature);
    if (bias != nullptr) up += bias[(gated ? inner : 0) + feature];
    if (threadIdx.x % kLanes == 0) {
      float value = gated ? activation::device::apply(params.activation, gate, up)
                          : activation::device::apply(params.activation, up, up);
      if (params.column_factors != nullptr) {
        value *= params.column_factors[expert * inner + feature];
      }
      params.intermediate[item] = value;
    }
  }
}

// Rounds the intermediate rows in place to the values of their codes, one warp per 128 columns,
// where a scale of float32 for each of these keeps bf16 from holding the values.
__global__ void __launch_bounds__(kThreads)
    reference_quantise(const __grid_constant__ ReferenceParams params) {
  const int64_t rows = params.expert_begin[params.num_experts];
  const int64_t inner = params.intermediate_size;
  const int64_t width = quant::kActivationGroup;
  const int64_t groups = (inner + width - 1) / width;
  const int64_t warps = int64_t{gridDim.x} * kWarpsPerBlock;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int64_t item = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kLanes;
       item < rows * groups; item += warps) {
    float* const row = params.intermediate + item / groups * inner;
    const int64_t begin = item % groups * width;
    const int64_t end = begin + width < inner ? begin + width : inner;
    float amax = 0;
    bool is_finite = true;
    for (int64_t col = begin + lane; col < end; col += kLanes) {
      amax = fmaxf(amax, fabsf(row[col]));
      is_finite = is_finite && isfinite(row[col]);
    }
    for (int step = kLanes / 2; step > 0; step /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, step));
    }
    is_finite = __all_sync(0xffffffffU, is_finite) != 0;
    visit_format(params.row_codes, quant::CodedFormats{}, [&](auto format) {
      float scale = quant::step_of(amax, format.kLargest, params.power_of_two);
      if (!format.kHasNan && !is_finite) scale = NAN;
      for (int64_t col = begin + lane; col < end; col += kLanes) {
        row[col] = format.decode(quant::row_code<decltype(format)>(row[col], scale)) * scale;
      }
    });
  }
}

// Multiplies activated rows by their columns' factors, once adapters have read them.
__global__ void __launch_bounds__(kThreads)
    reference_scale_columns(const __grid_constant__ ReferenceParams params) {
  const int64_t inner = params.intermediate_size;
  const int64_t items = params.expert_begin[params.num_experts] * inner;
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x; item < items; item += threads) {
    const int64_t expert = expert_of(params, item / inner);
    params.intermediate[item] *= params.column_factors[expert * inner + item % inner];
  }
}

template <bool kAdapts>
__global__ void __launch_bounds__(kThreads)
    reference_down(const __grid_constant__ ReferenceParams params) {
  const int64_t rows = params.expert_begin[params.num_experts];
  const int64_t hidden = params.hidden_size;
  const int64_t warps = int64_t{gridDim.x} * kWarpsPerBlock;
  const Matrix intermediate{.data = params.intermediate,
                            .stride = params.intermediate_size,
                            .dtype = DType::kF32,
                            .bits = 32};
  for (int64_t item = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kLanes;
       item < rows * hidden; item += warps) {
    const int64_t row = item / hidden;
    const int64_t column = item % hidden;
    const int64_t expert = expert_of(params, row);
    const Matrix weights = of_expert(params.down, expert, params.down_elements, params.down_scales);
    float sum = warp_dot(weights, column, intermediate, row, params.intermediate_size);
    sum = with_terms<kAdapts>(sum, params.down_terms, row, 0, column);
    if (params.down_bias != nullptr) sum += params.down_bias[expert * hidden + column];
    if (threadIdx.x % kLanes == 0) {
      store_element(params.output, params.output_dtype,
                    params.row_slot[row] * params.output_stride + column, sum);
    }
  }
}

// A matrix [rows, cols] per expert, with scales of the form that the weights have.
Matrix weight_matrix(const void* data, int64_t stride, int64_t cols, const float* scales,
                     const ExpertsProblem& problem) {
  Matrix matrix{.data = data,
                .stride = stride,
                .dtype = problem.weight_dtype,
                .bits = bit_size(problem.weight_dtype),
                .order = code_order(problem),
                .scales = scales};
  const quant::CodeBook* const codes = quant::format_of(problem.weight_dtype).codes;
  if (codes != nullptr) matrix.code_of_zero = -codes->whole.least;
  if (scales == nullptr) return matrix;
  if (problem.quant.weights == WeightScale::kBlock) {
    matrix.scale_rows = problem.quant.block_rows;
    matrix.scale_cols = problem.quant.block_cols;
    matrix.scale_stride = (cols + matrix.scale_cols - 1) / matrix.scale_cols;
  } else {
    matrix.scale_cols = cols;
  }
  return matrix;
}

Matrix input_matrix(const ExpertsProblem& problem, const DeviceExperts& weights,
                    const DeviceRows& rows) {
  Matrix matrix{.data = rows.data,
                .stride = rows.row_stride,
                .dtype = rows.dtype,
                .bits = bit_size(rows.dtype)};
  if (row_terms(problem) == 2 && rows.dtype == DType::kBF16) {
    matrix.term_columns = columns_of_stage(problem);
  }
  const quant::RowFactor factor = quant::row_factor(problem.quant);
  if (factor == quant::RowFactor::kStated) {
    matrix.scales = weights.input_scale;
    matrix.scale_cols = problem.hidden_size;
    matrix.scale_stride = 0;
    return matrix;
  }
  if (is_plain(rows.dtype) && factor == quant::RowFactor::kNone) return matrix;
  matrix.scales = rows.scales;
  matrix.scale_stride = rows.scale_stride;
  const bool grouped = problem.quant.activations == ActivationScale::kGroup;
  matrix.scale_cols = grouped ? quant::kActivationGroup : problem.hidden_size;
  return matrix;
}

int64_t scales_per_expert(const Matrix& matrix, int64_t rows) {
  return (rows + matrix.scale_rows - 1) / matrix.scale_rows * matrix.scale_stride;
}

ReferenceParams make_params(const ExpertsProblem& problem, const DeviceExperts& weights,
                            const DeviceExpertsCall& call) {
  const int64_t halves = problem.activation.gated ? 2 : 1;
  const int64_t hidden = problem.hidden_size;
  const int64_t inner = problem.intermediate_size;
  ReferenceParams params;
  params.num_experts = problem.num_local_experts;
  params.input_columns = problem.input_columns();
  params.hidden_size = hidden;
  params.intermediate_size = inner;
  params.activation = activation::device_activation(problem.activation);
  params.gate_up = weight_matrix(weights.gate_up.data, weights.gate_up.stride,
                                 problem.input_columns(), weights.gate_up.scale, problem);
  params.down =
      weight_matrix(weights.down.data, weights.down.stride, inner, weights.down.scale, problem);
  params.gate_up.offsets = weights.gate_up.offset;
  params.down.offsets = weights.down.offset;
  params.gate_up_elements = halves * inner * weights.gate_up.stride;
  params.down_elements = hidden * weights.down.stride;
  params.gate_up_scales = halves * scales_per_expert(params.gate_up, inner);
  params.down_scales = scales_per_expert(params.down, hidden);
  params.gate_up_bias = weights.gate_up.bias;
  params.down_bias = weights.down.bias;
  params.column_factors = weights.down.column_factors;
  params.input = input_matrix(problem, weights, call.input);
  params.expert_begin = call.groups.expert_begin;
  params.row_slot = call.groups.row_slot;
  params.top_k = call.groups.top_k;
  params.input_weights = call.input_weights;
  params.intermediate = static_cast<float*>(call.workspace);
  if (const quant::CodeBook* codes = quant::format_of(problem.weight_dtype).row_codes) {
    params.row_codes = codes->element;
  }
  params.power_of_two = problem.quant.power_of_two_scales;
  params.output = call.output;
  params.output_stride = call.output_stride;
  params.output_dtype = is_plain(problem.weight_dtype) ? problem.weight_dtype : DType::kBF16;
  return params;
}

cuda::LaunchShape shape_for(const ExpertsProblem& problem, int64_t items, CUstream_st* stream) {
  constexpr int64_t kBlocksPerMultiprocessor = 8;
  const int64_t wanted = (items + kWarpsPerBlock - 1) / kWarpsPerBlock;
  const int64_t most = problem.gpu().multiprocessors * kBlocksPerMultiprocessor;
  return {.blocks = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1)),
          .threads = kThreads,
          .overlap = cuda::Overlap::kNone,
          .stream = stream};
}

void quantise_intermediate(const ExpertsProblem& problem, const DeviceExperts& weights,
                           const ReferenceParams& params, int64_t rows, CUstream_st* stream) {
  if (problem.quant.activations == ActivationScale::kNone) return;
  if (!quant::value_rows_support(problem.weight_dtype, problem.quant)) {
    cuda::launch("experts.reference.quantise", reference_quantise, shape_for(problem, rows, stream),
                 params);
    return;
  }
  round_rows_cuda({.rows = params.intermediate,
                   .dtype = DType::kF32,
                   .num_rows = rows,
                   .live_rows = params.expert_begin + problem.num_local_experts,
                   .columns = problem.intermediate_size,
                   .row_stride = problem.intermediate_size,
                   .rule = row_rounding(problem.weight_dtype, problem.quant),
                   .stated_step = weights.intermediate_scale,
                   .values = params.intermediate,
                   .value_dtype = DType::kF32,
                   .value_stride = problem.intermediate_size},
                  stream);
}

}  // namespace

void run_reference(const ExpertsProblem& problem, const DeviceExperts& weights,
                   const DeviceExpertsCall& call, CUstream_st* stream) {
  const ReferenceParams params = make_params(problem, weights, call);
  const int64_t rows = call.groups.max_rows;
  if (rows == 0) return;
  cuda::launch("experts.reference.up", reference_up<false>,
               shape_for(problem, rows * problem.intermediate_size, stream), params);
  quantise_intermediate(problem, weights, params, rows, stream);
  cuda::launch("experts.reference.down", reference_down<false>,
               shape_for(problem, rows * problem.hidden_size, stream), params);
}

void run_adapted_reference(const ExpertsProblem& problem, const DeviceExperts& weights,
                           const AdaptedCall& call, CUstream_st* stream) {
  const DeviceExpertsCall& experts = call.experts;
  const int64_t rows = experts.groups.max_rows;
  if (rows == 0) return;
  const int64_t inner = problem.intermediate_size;
  ReferenceParams params = make_params(problem, weights, experts);
  params.up_terms = call.up;
  params.down_terms = call.down;
  ReferenceParams up = params;
  up.column_factors = nullptr;
  make_adapter_terms(call, AdaptedProduct::kGateUp, call.source, stream);
  cuda::launch("experts.reference.up", reference_up<true>, shape_for(problem, rows * inner, stream),
               up);
  make_adapter_terms(call, AdaptedProduct::kDown,
                     {.rows = params.intermediate,
                      .dtype = DType::kF32,
                      .stride = inner,
                      .columns = inner,
                      .is_sorted = true},
                     stream);
  if (params.column_factors != nullptr) {
    cuda::launch("experts.reference.scale_columns", reference_scale_columns,
                 shape_for(problem, rows * inner / kLanes + 1, stream), params);
  }
  quantise_intermediate(problem, weights, params, rows, stream);
  cuda::launch("experts.reference.down", reference_down<true>,
               shape_for(problem, rows * problem.hidden_size, stream), params);
}

}  // namespace conclave::inline v0::experts::detail
