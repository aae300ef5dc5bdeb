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

// Weight rows and their scales.
struct Matrix {
  const void* codes = nullptr;
  int64_t rows = 0;  // per expert
  int64_t cols = 0;
  int64_t stride = 0;
  const float* scales = nullptr;
  bool block_scales = false;
  int64_t half_rows = 0;  // rows in one half: blocks restart at the up half
};

__device__ double warp_sum(double value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffU, value, step);
  return value;
}

enum class Terms { kProducts, kSquares };

// Computes row `row` of `expert` times x in float64 with one warp, or the sum of the products'
// squares.
template <class Element, Terms kTerms = Terms::kProducts>
__device__ double dot(const Matrix& m, int64_t expert, int64_t row, const double* x) {
  const Element* codes = static_cast<const Element*>(m.codes) + (expert * m.rows + row) * m.stride;
  const auto term = [](double product) {
    return kTerms == Terms::kSquares ? product * product : product;
  };
  const int64_t lane = threadIdx.x % 32;
  double sum = 0;
  if (!m.block_scales) {
    for (int64_t i = lane; i < m.cols; i += 32) sum += term(device::widen(codes[i]) * x[i]);
    sum = warp_sum(sum);
    return m.scales == nullptr ? sum : sum * term(m.scales[expert * m.rows + row]);
  }
  const int64_t col_blocks = (m.cols + kBlock - 1) / kBlock;
  const int64_t row_blocks = (m.half_rows + kBlock - 1) / kBlock;
  const int64_t halves = m.rows / m.half_rows;
  const int64_t row_block = row / m.half_rows * row_blocks + row % m.half_rows / kBlock;
  const float* scales = m.scales + (expert * halves * row_blocks + row_block) * col_blocks;
  for (int64_t i = lane; i < m.cols; i += 32) {
    sum += term(device::widen(codes[i]) * double{scales[i / kBlock]} * x[i]);
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
// Comparisons are false for NaN, so NaN passes through.
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

// Writes the input row of every slot in float64.
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

// Uses one warp per output. Slots vary fastest, so that neighbours of one expert share the weights
// in L2.
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

struct RequantizeArgs {
  double* rows = nullptr;   // [slots, cols], replaced by the values that codes and scale represent
  double* moves = nullptr;  // [slots, cols]: how far an ambiguous value may move, or 0
  int64_t cols = 0;
  int64_t group_columns = 0;
  bool power_of_two = false;
  const float* static_step = nullptr;
  double ambiguity = 0;
};

// Values that are not finite give NaN, even with a static step, where saturation would hide them.
__device__ double code_value(double quotient) {
  if (!isfinite(quotient)) return NAN;
  return device::widen(device::narrow<__nv_fp8_e4m3>(quotient));
}

// Uses one block per slot.
__global__ void requantize_kernel(RequantizeArgs a) {
  __shared__ float partial[kThreads];
  double* row = a.rows + blockIdx.x * a.cols;
  double* moves = a.moves + blockIdx.x * a.cols;
  for (int64_t begin = 0; begin < a.cols; begin += a.group_columns) {
    const int64_t end = min(a.cols, begin + a.group_columns);
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
    const double step = a.static_step != nullptr
                            ? *a.static_step
                            : device::quantization_step(partial[0], a.power_of_two);
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      const double q = row[i] / step;
      const double move = code_value(q * (1 + a.ambiguity)) - code_value(q * (1 - a.ambiguity));
      moves[i] = isfinite(move) ? move * step : 0.0;
      row[i] = code_value(q) * step;
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

// With kSquares: squares of how far the moves `activated` may shift each output, without bias.
template <class Element, Terms kTerms>
__global__ void down_kernel(DownArgs a) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= a.num_slots * a.matrix.rows) return;
  const int64_t row = index / a.num_slots;
  const int64_t s = index % a.num_slots;
  const OracleSlot slot = a.slots[s];
  double value = 0;
  if (slot.expert >= 0) {
    value = dot<Element, kTerms>(a.matrix, slot.expert, row, a.activated + s * a.matrix.cols);
    if (kTerms == Terms::kProducts && a.bias != nullptr)
      value += double{a.bias[slot.expert * a.matrix.rows + row]};
  }
  if (threadIdx.x % 32 == 0) a.rows[s * a.matrix.rows + row] = value;
}

// Row i of the result is the sum of factors[j] * rows[j] over the k slots of token i.
__global__ void sum_kernel(const double* rows, const OracleSlot* slots, const double* factors,
                           int64_t top_k, int64_t cols, double* sums) {
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    double sum = 0;
    for (int64_t j = blockIdx.x * top_k; j < (blockIdx.x + 1) * top_k; ++j) {
      if (slots[j].expert >= 0) sum += factors[j] * rows[j * cols + i];
    }
    sums[blockIdx.x * cols + i] = sum;
  }
}

// Sums of squares over one row.
struct RowSquares {
  double error = 0;
  double norm = 0;
  double allowance = 0;
};

struct CompareArgs {
  OutputRows output;
  const int64_t* output_row = nullptr;  // for each expected row
  const double* expected = nullptr;     // [rows, output.cols]
  const double* allowed = nullptr;      // [rows, output.cols] squares, or null
  RowSquares* squares = nullptr;
};

template <class Element>
__global__ void compare_kernel(CompareArgs a) {
  __shared__ RowSquares partial[kWarps];
  const Element* actual =
      static_cast<const Element*>(a.output.data) + a.output_row[blockIdx.x] * a.output.stride;
  const double* expected = a.expected + blockIdx.x * a.output.cols;
  RowSquares sum;
  for (int64_t i = threadIdx.x; i < a.output.cols; i += kThreads) {
    const double got = device::widen(actual[i]);
    const double wanted = expected[i];
    if (isnan(got) && isnan(wanted)) continue;
    if (got != wanted) sum.error += (got - wanted) * (got - wanted);
    sum.norm += wanted * wanted;
    if (a.allowed != nullptr) sum.allowance += a.allowed[blockIdx.x * a.output.cols + i];
  }
  sum = {warp_sum(sum.error), warp_sum(sum.norm), warp_sum(sum.allowance)};
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) {
    sum.error += partial[warp].error;
    sum.norm += partial[warp].norm;
    sum.allowance += partial[warp].allowance;
  }
  a.squares[blockIdx.x] = sum;
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

// Calls call(Element{}) with the element type of `dtype`.
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

// The output rows of all slots in float64: [slots, H].
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
    if (quantised()) {
      const cuda::DeviceBuffer moves = doubles(count_ * features_);
      allowed_ = doubles(count_ * hidden_);
      requantize(activated.as<double>(), moves.as<double>());
      down<Terms::kSquares>(moves.as<double>(), allowed_.as<double>());
      cuda::check(cudaDeviceSynchronize(), "testing oracle");
    }
    down<Terms::kProducts>(activated.as<double>(), rows_.as<double>());
    cuda::check(cudaDeviceSynchronize(), "testing oracle");
  }

  const OracleSlot* slots() const { return slots_.as<OracleSlot>(); }
  const double* rows() const { return rows_.as<double>(); }
  // Squares of how far ambiguous codes may shift each element; null without e4m3 activations.
  const double* allowed() const { return allowed_.as<double>(); }

 private:
  bool quantised() const { return problem_.sizes.quant.activations != ActivationScale::kNone; }
  bool block_scales() const { return problem_.sizes.quant.weights == WeightScale::kBlock; }

  void up(const double* x, double* activated) const {
    const bool gated = problem_.sizes.activation.gated;
    const UpArgs args{.matrix = {.codes = problem_.weights.gate_up.data,
                                 .rows = (gated ? 2 : 1) * features_,
                                 .cols = hidden_,
                                 .stride = problem_.weights.gate_up.stride,
                                 .scales = problem_.weights.gate_up.scale,
                                 .block_scales = block_scales(),
                                 .half_rows = features_},
                      .formula = formula_of(problem_.sizes.activation),
                      .gated = gated,
                      .bias = problem_.weights.gate_up.bias,
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

  void requantize(double* activated, double* moves) const {
    const QuantSpec& quant = problem_.sizes.quant;
    const bool is_static = quant.activations == ActivationScale::kTensorStatic;
    const RequantizeArgs args{
        .rows = activated,
        .moves = moves,
        .cols = features_,
        .group_columns = quant.activations == ActivationScale::kGroup ? kBlock : features_,
        .power_of_two = quant.power_of_two_scales,
        .static_step = is_static ? problem_.weights.intermediate_scale : nullptr,
        .ambiguity = problem_.ambiguity};
    cuda::launch("testing.requantize", requantize_kernel, shape(count_), args);
  }

  template <Terms kTerms>
  void down(const double* activated, double* rows) const {
    const DownArgs args{.matrix = {.codes = problem_.weights.down.data,
                                   .rows = hidden_,
                                   .cols = features_,
                                   .stride = problem_.weights.down.stride,
                                   .scales = problem_.weights.down.scale,
                                   .block_scales = block_scales(),
                                   .half_rows = hidden_},
                        .bias = problem_.weights.down.bias,
                        .slots = slots(),
                        .num_slots = count_,
                        .activated = activated,
                        .rows = rows};
    with_element(problem_.sizes.weight_dtype, [&](auto element) {
      cuda::launch("testing.down", down_kernel<decltype(element), kTerms>,
                   shape((count_ * hidden_ + kWarps - 1) / kWarps), args);
    });
  }

  OracleProblem problem_;
  int64_t hidden_;
  int64_t features_;
  int64_t count_;
  cuda::DeviceBuffer slots_;
  cuda::DeviceBuffer rows_;
  cuda::DeviceBuffer allowed_;
};

RowErrors summarize(std::span<const RowSquares> rows, std::span<const int64_t> output_row) {
  RowErrors result{.checked = static_cast<int64_t>(rows.size())};
  std::vector<double> errors;
  RowSquares total;
  for (size_t i = 0; i < rows.size(); ++i) {
    const RowSquares& row = rows[i];
    const double norm = row.norm > 0 ? std::sqrt(row.norm) : 1.0;
    double error = std::sqrt(row.error) / norm;
    if (!std::isfinite(error)) error = HUGE_VAL;
    errors.push_back(error);
    total.error += row.error;
    total.norm += row.norm;
    total.allowance += row.allowance;
    result.ambiguous_rows += row.allowance > 0 ? 1.0 / static_cast<double>(rows.size()) : 0.0;
    result.excess = std::max(result.excess, error - std::sqrt(row.allowance) / norm);
    if (result.worst_row >= 0 && error <= result.worst) continue;
    result.worst = error;
    result.worst_row = output_row[i];
  }
  std::sort(errors.begin(), errors.end());
  result.median = errors[errors.size() / 2];
  result.p999 = errors[(errors.size() * 999 + 999) / 1000 - 1];
  const double norm = total.norm > 0 ? std::sqrt(total.norm) : 1.0;
  const double aggregate = std::sqrt(total.error) / norm;
  result.aggregate = std::isfinite(aggregate) ? aggregate : HUGE_VAL;
  result.aggregate_excess = std::max(0.0, result.aggregate - std::sqrt(total.allowance) / norm);
  return result;
}

RowErrors compare(const OutputRows& output, std::span<const int64_t> output_row,
                  const double* expected, const double* allowed) {
  const auto count = static_cast<int64_t>(output_row.size());
  const cuda::DeviceBuffer rows = uploaded(output_row);
  const cuda::DeviceBuffer squares(output_row.size() * sizeof(RowSquares));
  const CompareArgs args{.output = output,
                         .output_row = rows.as<int64_t>(),
                         .expected = expected,
                         .allowed = allowed,
                         .squares = squares.as<RowSquares>()};
  with_element(output.dtype, [&](auto element) {
    cuda::launch("testing.compare", compare_kernel<decltype(element)>, shape(count), args);
  });
  std::vector<RowSquares> found(output_row.size());
  cuda::copy_to_host(squares.data(), std::as_writable_bytes(std::span(found)));
  return summarize(found, output_row);
}

// The weighted sums of `rows` per token: [slots / top_k, cols].
cuda::DeviceBuffer token_sums(const ExpertRows& slots, const double* rows,
                              std::span<const double> factors, int64_t top_k, int64_t cols) {
  const int64_t tokens = static_cast<int64_t>(factors.size()) / top_k;
  const cuda::DeviceBuffer device_factors = uploaded(factors);
  cuda::DeviceBuffer sums = doubles(tokens * cols);
  cuda::launch("testing.sum", sum_kernel, shape(tokens), rows, slots.slots(),
               device_factors.as<double>(), top_k, cols, sums.as<double>());
  cuda::check(cudaDeviceSynchronize(), "testing oracle");
  return sums;
}

}  // namespace

std::string RowErrors::describe() const {
  char text[240];
  std::snprintf(
      text, sizeof text,
      "worst %.2e (row %lld) excess %.2e p99.9 %.2e median %.2e all %.2e of %lld rows (%.0f %% "
      "ambiguous), stray %lld",
      worst, static_cast<long long>(worst_row), excess, p999, median, aggregate,
      static_cast<long long>(checked), 100 * ambiguous_rows, static_cast<long long>(stray));
  return text;
}

bool within(const RowErrors& errors, double tolerance) {
  constexpr int64_t kManyRows = 2000;  // enough for code flips to average out
  const double whole = errors.checked < kManyRows ? errors.aggregate_excess : errors.aggregate;
  return errors.stray == 0 && errors.excess <= tolerance && whole <= tolerance;
}

RowErrors compare_slots(const OracleProblem& problem, std::span<const OracleSlot> slots,
                        const OutputRows& output) {
  if (slots.empty()) return {};
  const ExpertRows rows(problem, slots);
  std::vector<int64_t> output_row;
  for (const OracleSlot& slot : slots) output_row.push_back(slot.slot);
  return compare(output, output_row, rows.rows(), rows.allowed());
}

RowErrors compare_tokens(const OracleProblem& problem, const TokenSum& sum,
                         const OutputRows& output) {
  if (sum.slots.empty()) return {};
  const ExpertRows rows(problem, sum.slots);
  std::vector<double> factors;
  for (const float weight : sum.slot_weights) factors.push_back(sum.scale * double{weight});
  const auto sums = token_sums(rows, rows.rows(), factors, sum.top_k, output.cols);
  cuda::DeviceBuffer allowed;
  if (rows.allowed() != nullptr) {
    for (double& factor : factors) factor *= factor;
    allowed = token_sums(rows, rows.allowed(), factors, sum.top_k, output.cols);
  }
  std::vector<int64_t> output_row;
  for (size_t i = 0; i < sum.slots.size(); i += static_cast<size_t>(sum.top_k)) {
    output_row.push_back(sum.slots[i].token);
  }
  return compare(output, output_row, sums.as<double>(), allowed.as<double>());
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
