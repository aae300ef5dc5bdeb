#include "cuda/check.h"
#include "cuda/launch.h"
#include "cuda/memory.h"
#include "support/cuda/device_oracle.h"
#include "support/cuda/value.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace conclave::testing {

namespace {

using activation::ActivationId;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlock = 128;  // rows and columns of a weight block, columns of an activation group

// Weight rows with their scales.
struct Matrix {
  const void* codes = nullptr;
  int64_t rows = 0;  // of one expert
  int64_t cols = 0;
  int64_t stride = 0;
  const float* scales = nullptr;
  bool block_scales = false;
  int64_t half_rows = 0;  // rows of one half: blocks restart at the up half
};

__device__ double warp_sum(double value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffU, value, step);
  return value;
}

// Row `row` of `expert` times x, in float64, by one warp.
template <class Element>
__device__ double dot(const Matrix& m, int64_t expert, int64_t row, const double* x) {
  const Element* codes = static_cast<const Element*>(m.codes) + (expert * m.rows + row) * m.stride;
  const int64_t lane = threadIdx.x % 32;
  double sum = 0;
  if (!m.block_scales) {
    for (int64_t i = lane; i < m.cols; i += 32) sum += device::widen(codes[i]) * x[i];
    sum = warp_sum(sum);
    return m.scales == nullptr ? sum : sum * m.scales[expert * m.rows + row];
  }
  const int64_t col_blocks = (m.cols + kBlock - 1) / kBlock;
  const int64_t row_blocks = (m.half_rows + kBlock - 1) / kBlock;
  const int64_t halves = m.rows / m.half_rows;
  const int64_t row_block = row / m.half_rows * row_blocks + row % m.half_rows / kBlock;
  const float* scales = m.scales + (expert * halves * row_blocks + row_block) * col_blocks;
  for (int64_t i = lane; i < m.cols; i += 32) {
    sum += device::widen(codes[i]) * double{scales[i / kBlock]} * x[i];
  }
  return warp_sum(sum);
}

__device__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
__device__ double silu(double x) { return x < -700.0 ? 0.0 : x * sigmoid(x); }
__device__ double gelu(double x) { return x < -40.0 ? 0.0 : 0.5 * x * erfc(-x * sqrt(0.5)); }
__device__ double gelu_tanh(double x) {
  const double z = 0.79788456080286535588 * (x + 0.044715 * x * x * x);
  return x < -40.0 ? 0.0 : x * sigmoid(2.0 * z);
}
// Comparisons are false for NaN, which goes through.
__device__ double at_most(double x, double limit) { return x > limit ? limit : x; }
__device__ double within_limit(double x, double limit) {
  return x < -limit ? -limit : at_most(x, limit);
}

struct Formula {
  ActivationId id = ActivationId::kSilu;
  double limit = INFINITY;
  double alpha = 1;
  double beta = 1;
  double linear_beta = 0;
};

__device__ double activate(const Formula& f, double gate, double up) {
  switch (f.id) {
    case ActivationId::kSilu:
      return silu(gate) * up;
    case ActivationId::kGelu:
      return gelu(gate) * up;
    case ActivationId::kGeluTanh:
      return gelu_tanh(gate) * up;
    case ActivationId::kSwigluOai: {
      const double g = at_most(gate, f.limit);
      const double weighed = f.alpha * g < -700.0 ? 0.0 : g * sigmoid(f.alpha * g);
      return (within_limit(up, f.limit) + f.beta) * weighed;
    }
    case ActivationId::kSiluClampBefore:
      return silu(at_most(gate, f.limit)) * within_limit(up, f.limit);
    case ActivationId::kSiluClampAfter:
      return at_most(silu(gate), f.limit) * within_limit(up, f.limit);
    case ActivationId::kSitu: {
      const double bent = f.linear_beta > 0 ? f.linear_beta * tanh(up / f.linear_beta) : up;
      return f.beta * tanh(gate / f.beta) * sigmoid(gate) * bent;
    }
    case ActivationId::kSiluNoMul:
      return silu(up);
    case ActivationId::kGeluNoMul:
      return gelu(up);
    case ActivationId::kGeluTanhNoMul:
      return gelu_tanh(up);
    case ActivationId::kRelu2NoMul:
      return up < 0.0 ? 0.0 : up * up;
  }
  return NAN;
}

// The input row of every slot in float64.
template <class Element>
__global__ void widen_kernel(DeviceRows input, int64_t cols, const OracleSlot* slots, double* x) {
  const int64_t token = slots[blockIdx.x].token;
  const Element* source = static_cast<const Element*>(input.data) + token * input.row_stride;
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    double value = device::widen(source[i]);
    if (input.scales != nullptr) {
      const int64_t group = input.scale_stride == 1 ? 0 : i / kBlock;
      value *= double{input.scales[token * input.scale_stride + group]};
    }
    x[blockIdx.x * cols + i] = value;
  }
}

struct UpArgs {
  Matrix matrix;
  Formula formula;
  bool gated = true;
  const float* bias = nullptr;
  const float* input_weights = nullptr;
  const OracleSlot* slots = nullptr;
  int64_t num_slots = 0;
  int64_t features = 0;
  const double* x = nullptr;    // [slots, cols]
  double* activated = nullptr;  // [slots, features]
};

// A warp an output. Slots run fastest, so that neighbours of one expert share the weights in L2.
template <class Element>
__global__ void up_kernel(UpArgs a) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= a.num_slots * a.features) return;
  const int64_t feature = index / a.num_slots;
  const int64_t s = index % a.num_slots;
  const OracleSlot slot = a.slots[s];
  if (slot.expert < 0) return;
  const double* x = a.x + s * a.matrix.cols;
  const int64_t up_row = a.gated ? a.features + feature : feature;
  double gate = a.gated ? dot<Element>(a.matrix, slot.expert, feature, x) : 0.0;
  double up = dot<Element>(a.matrix, slot.expert, up_row, x);
  if (a.input_weights != nullptr) {
    gate *= double{a.input_weights[slot.slot]};
    up *= double{a.input_weights[slot.slot]};
  }
  if (a.bias != nullptr) {
    const float* bias = a.bias + slot.expert * a.matrix.rows;
    if (a.gated) gate += double{bias[feature]};
    up += double{bias[up_row]};
  }
  if (threadIdx.x % 32 == 0) a.activated[s * a.features + feature] = activate(a.formula, gate, up);
}

// The values that codes and scale of each group stand for, in place. A block a slot.
__global__ void requantize_kernel(double* rows, int64_t cols, int64_t group_columns,
                                  bool power_of_two, const float* static_step) {
  __shared__ float partial[kThreads];
  double* row = rows + blockIdx.x * cols;
  for (int64_t begin = 0; begin < cols; begin += group_columns) {
    const int64_t end = min(cols, begin + group_columns);
    float amax = 0;
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      amax = fmaxf(amax, fabsf(static_cast<float>(row[i])));
    }
    partial[threadIdx.x] = amax;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (static_cast<int>(threadIdx.x) < half) {
        partial[threadIdx.x] = fmaxf(partial[threadIdx.x], partial[threadIdx.x + half]);
      }
      __syncthreads();
    }
    const float step =
        static_step != nullptr ? *static_step : device::quantization_step(partial[0], power_of_two);
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      row[i] = device::widen(device::narrow<__nv_fp8_e4m3>(row[i] / double{step})) * double{step};
    }
    __syncthreads();
  }
}

struct DownArgs {
  Matrix matrix;
  const float* bias = nullptr;
  const OracleSlot* slots = nullptr;
  int64_t num_slots = 0;
  const double* activated = nullptr;
  double* rows = nullptr;  // [slots, matrix.rows]
};

template <class Element>
__global__ void down_kernel(DownArgs a) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= a.num_slots * a.matrix.rows) return;
  const int64_t row = index / a.num_slots;
  const int64_t s = index % a.num_slots;
  const OracleSlot slot = a.slots[s];
  double value = 0;
  if (slot.expert >= 0) {
    value = dot<Element>(a.matrix, slot.expert, row, a.activated + s * a.matrix.cols);
    if (a.bias != nullptr) value += double{a.bias[slot.expert * a.matrix.rows + row]};
  }
  if (threadIdx.x % 32 == 0) a.rows[s * a.matrix.rows + row] = value;
}

// Row i of the result: scale * sum of weights[j] * rows[j] over the k slots of token i.
__global__ void sum_kernel(const double* rows, const OracleSlot* slots, const float* weights,
                           int64_t top_k, int64_t cols, double scale, double* sums) {
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    double sum = 0;
    for (int64_t j = blockIdx.x * top_k; j < (blockIdx.x + 1) * top_k; ++j) {
      if (slots[j].expert >= 0) sum += double{weights[j]} * rows[j * cols + i];
    }
    sums[blockIdx.x * cols + i] = scale * sum;
  }
}

struct CompareArgs {
  OutputRows output;
  const int64_t* output_row = nullptr;  // of each expected row
  const double* expected = nullptr;     // [rows, output.cols]
  double* errors = nullptr;
};

template <class Element>
__global__ void compare_kernel(CompareArgs a) {
  __shared__ double partial[2][kWarps];
  const Element* actual =
      static_cast<const Element*>(a.output.data) + a.output_row[blockIdx.x] * a.output.stride;
  const double* expected = a.expected + blockIdx.x * a.output.cols;
  double error = 0;
  double norm = 0;
  for (int64_t i = threadIdx.x; i < a.output.cols; i += kThreads) {
    const double got = device::widen(actual[i]);
    const double wanted = expected[i];
    if (isnan(got) && isnan(wanted)) continue;
    if (got != wanted) error += (got - wanted) * (got - wanted);
    norm += wanted * wanted;
  }
  error = warp_sum(error);
  norm = warp_sum(norm);
  if (threadIdx.x % 32 == 0) {
    partial[0][threadIdx.x / 32] = error;
    partial[1][threadIdx.x / 32] = norm;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) {
    error += partial[0][warp];
    norm += partial[1][warp];
  }
  a.errors[blockIdx.x] = norm > 0 ? sqrt(error / norm) : sqrt(error);
}

template <class Bits>
__global__ void stray_kernel(OutputRows output, const uint8_t* may_write,
                             unsigned long long* count) {
  const auto* row = static_cast<const Bits*>(output.data) + blockIdx.x * output.stride;
  const int64_t begin = may_write[blockIdx.x] != 0 ? output.cols : 0;
  unsigned long long stray = 0;
  for (int64_t i = begin + threadIdx.x; i < output.stride; i += kThreads) {
    stray += row[i] != static_cast<Bits>(~Bits{0}) ? 1 : 0;
  }
  if (stray != 0) atomicAdd(count, stray);
}

cuda::LaunchShape shape(int64_t blocks) {
  return {.blocks = blocks, .threads = kThreads, .overlap = cuda::Overlap::kNone};
}

template <class T>
cuda::DeviceBuffer uploaded(std::span<const T> values) {
  cuda::DeviceBuffer buffer(values.size_bytes());
  cuda::upload(values, buffer.data());
  return buffer;
}

cuda::DeviceBuffer doubles(int64_t count) {
  return cuda::DeviceBuffer(static_cast<size_t>(count) * sizeof(double));
}

Formula formula_of(const activation::Activation& spec) {
  Formula f{.id = spec.id};
  const auto rounded = [](double value) { return double{static_cast<float>(value)}; };
  if (spec.limit > 0) f.limit = rounded(spec.limit);
  if (spec.alpha > 0) f.alpha = rounded(spec.alpha);
  if (spec.beta > 0) f.beta = rounded(spec.beta);
  f.linear_beta = rounded(spec.linear_beta);
  return f;
}

// call(Element{}) for the element type of `dtype`.
template <class Call>
void with_element(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kF32:
      return call(float{});
    case DType::kF16:
      return call(__half{});
    case DType::kF8E4M3:
      return call(__nv_fp8_e4m3{});
    default:
      return call(__nv_bfloat16{});
  }
}

// Output rows of all slots in float64: [slots, H].
class ExpertRows {
 public:
  ExpertRows(const OracleProblem& problem, std::span<const OracleSlot> slots)
      : problem_(problem),
        hidden_(problem.sizes.hidden_size),
        features_(problem.sizes.intermediate_size),
        count_(static_cast<int64_t>(slots.size())),
        slots_(uploaded(slots)),
        rows_(doubles(count_ * hidden_)) {
    const cuda::DeviceBuffer x = doubles(count_ * hidden_);
    const cuda::DeviceBuffer activated = doubles(count_ * features_);
    with_element(problem.input.dtype, [&](auto element) {
      cuda::launch("testing.widen", widen_kernel<decltype(element)>, shape(count_), problem.input,
                   hidden_, this->slots(), x.as<double>());
    });
    up(x.as<double>(), activated.as<double>());
    requantize(activated.as<double>());
    down(activated.as<double>());
    cuda::check(cudaDeviceSynchronize(), "testing oracle");
  }

  const OracleSlot* slots() const { return slots_.as<OracleSlot>(); }
  const double* rows() const { return rows_.as<double>(); }

 private:
  bool block_scales() const { return problem_.sizes.quant.weights == WeightScale::kBlock; }

  void up(const double* x, double* activated) const {
    const bool gated = problem_.sizes.activation.gated;
    const UpArgs args{.matrix = {.codes = problem_.weights.gate_up,
                                 .rows = (gated ? 2 : 1) * features_,
                                 .cols = hidden_,
                                 .stride = problem_.weights.gate_up_stride,
                                 .scales = problem_.weights.gate_up_scale,
                                 .block_scales = block_scales(),
                                 .half_rows = features_},
                      .formula = formula_of(problem_.sizes.activation),
                      .gated = gated,
                      .bias = problem_.weights.gate_up_bias,
                      .input_weights = problem_.input_weights,
                      .slots = slots(),
                      .num_slots = count_,
                      .features = features_,
                      .x = x,
                      .activated = activated};
    with_element(problem_.sizes.weight_dtype, [&](auto element) {
      cuda::launch("testing.up", up_kernel<decltype(element)>,
                   shape((count_ * features_ + kWarps - 1) / kWarps), args);
    });
  }

  void requantize(double* activated) const {
    const QuantSpec& quant = problem_.sizes.quant;
    if (quant.activations == ActivationScale::kNone) return;
    const int64_t group = quant.activations == ActivationScale::kGroup ? kBlock : features_;
    const bool is_static = quant.activations == ActivationScale::kTensorStatic;
    cuda::launch("testing.requantize", requantize_kernel, shape(count_), activated, features_,
                 group, quant.power_of_two_scales,
                 is_static ? problem_.weights.intermediate_scale : nullptr);
  }

  void down(const double* activated) const {
    const DownArgs args{.matrix = {.codes = problem_.weights.down,
                                   .rows = hidden_,
                                   .cols = features_,
                                   .stride = problem_.weights.down_stride,
                                   .scales = problem_.weights.down_scale,
                                   .block_scales = block_scales(),
                                   .half_rows = hidden_},
                        .bias = problem_.weights.down_bias,
                        .slots = slots(),
                        .num_slots = count_,
                        .activated = activated,
                        .rows = rows_.as<double>()};
    with_element(problem_.sizes.weight_dtype, [&](auto element) {
      cuda::launch("testing.down", down_kernel<decltype(element)>,
                   shape((count_ * hidden_ + kWarps - 1) / kWarps), args);
    });
  }

  OracleProblem problem_;
  int64_t hidden_;
  int64_t features_;
  int64_t count_;
  cuda::DeviceBuffer slots_;
  cuda::DeviceBuffer rows_;
};

RowErrors compare(const OutputRows& output, std::span<const int64_t> output_row,
                  const double* expected) {
  const auto count = static_cast<int64_t>(output_row.size());
  const cuda::DeviceBuffer rows = uploaded(output_row);
  const cuda::DeviceBuffer errors = doubles(count);
  const CompareArgs args{.output = output,
                         .output_row = rows.as<int64_t>(),
                         .expected = expected,
                         .errors = errors.as<double>()};
  with_element(output.dtype, [&](auto element) {
    cuda::launch("testing.compare", compare_kernel<decltype(element)>, shape(count), args);
  });
  std::vector<double> found(output_row.size());
  cuda::copy_to_host(errors.data(), std::as_writable_bytes(std::span(found)));

  RowErrors result{.checked = count};
  for (size_t i = 0; i < found.size(); ++i) {
    if (!std::isfinite(found[i])) found[i] = HUGE_VAL;
    if (result.worst_row >= 0 && found[i] <= result.worst) continue;
    result.worst = found[i];
    result.worst_row = output_row[i];
  }
  std::sort(found.begin(), found.end());
  result.p999 = found[(found.size() * 999 + 999) / 1000 - 1];
  return result;
}

}  // namespace

std::string RowErrors::describe() const {
  char text[160];
  std::snprintf(text, sizeof text, "worst %.2e (row %lld), p99.9 %.2e of %lld rows, stray %lld",
                worst, static_cast<long long>(worst_row), p999, static_cast<long long>(checked),
                static_cast<long long>(stray));
  return text;
}

bool within(const RowErrors& errors, double tolerance) {
  return errors.stray == 0 && errors.worst <= tolerance;
}

RowErrors compare_slots(const OracleProblem& problem, std::span<const OracleSlot> slots,
                        const OutputRows& output) {
  if (slots.empty()) return {};
  const ExpertRows rows(problem, slots);
  std::vector<int64_t> output_row;
  for (const OracleSlot& slot : slots) output_row.push_back(slot.slot);
  return compare(output, output_row, rows.rows());
}

RowErrors compare_tokens(const OracleProblem& problem, const TokenSum& sum,
                         const OutputRows& output) {
  if (sum.slots.empty()) return {};
  const ExpertRows rows(problem, sum.slots);
  const int64_t tokens = static_cast<int64_t>(sum.slots.size()) / sum.top_k;
  const cuda::DeviceBuffer weights = uploaded(sum.slot_weights);
  const cuda::DeviceBuffer sums = doubles(tokens * output.cols);
  cuda::launch("testing.sum", sum_kernel, shape(tokens), rows.rows(), rows.slots(),
               weights.as<float>(), sum.top_k, output.cols, sum.scale, sums.as<double>());
  std::vector<int64_t> output_row;
  for (int64_t i = 0; i < tokens; ++i) {
    output_row.push_back(sum.slots[static_cast<size_t>(i * sum.top_k)].token);
  }
  return compare(output, output_row, sums.as<double>());
}

int64_t count_stray(const OutputRows& output, std::span<const uint8_t> may_write) {
  if (output.rows == 0) return 0;
  const cuda::DeviceBuffer flags = uploaded(may_write);
  const unsigned long long zero = 0;
  const cuda::DeviceBuffer count = uploaded(std::span(&zero, 1));
  auto* counter = count.as<unsigned long long>();
  if (output.dtype == DType::kF32) {
    cuda::launch("testing.stray", stray_kernel<uint32_t>, shape(output.rows), output,
                 flags.as<uint8_t>(), counter);
  } else {
    cuda::launch("testing.stray", stray_kernel<uint16_t>, shape(output.rows), output,
                 flags.as<uint8_t>(), counter);
  }
  unsigned long long result = 0;
  cuda::copy_to_host(count.data(), std::as_writable_bytes(std::span(&result, 1)));
  return static_cast<int64_t>(result);
}

}  // namespace conclave::testing
