// Compares the device oracle with plain loops on the host, at sizes where those take no time, and
// tests that the checks detect faults. Prints one line per case; the exit status is 1 if one
// failed.
#include "activation/activations.h"
#include "core/float_convert.h"
#include "cuda/check.h"
#include "support/cuda/cuda_problem.h"
#include "support/cuda/graph_timer.h"
#include "support/cuda/guarded_device.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

namespace {

using namespace conclave;
using namespace conclave::testing;

template <class T>
std::vector<T> downloaded(const void* data, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  cuda::copy_to_host(data, std::as_writable_bytes(std::span(values)));
  return values;
}

double decode_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code >= 128 ? -magnitude : magnitude;
}

// The nearest of all codes; if two are equally near, the even one.
double round_e4m3(double value) {
  double best = 0;
  double distance = HUGE_VAL;
  bool best_is_even = true;
  for (int code = 0; code < 127; ++code) {
    const double candidate = decode_e4m3(static_cast<uint8_t>(code));
    const double d = std::abs(std::abs(value) - candidate);
    if (d < distance || (d == distance && !best_is_even)) {
      best = candidate;
      distance = d;
      best_is_even = code % 2 == 0;
    }
  }
  return std::copysign(best, value);
}

std::vector<double> decoded(const void* data, int64_t count, DType dtype) {
  std::vector<double> values;
  if (dtype == DType::kF8E4M3) {
    for (const uint8_t code : downloaded<uint8_t>(data, count)) values.push_back(decode_e4m3(code));
  } else if (dtype == DType::kF32) {
    for (const float value : downloaded<float>(data, count)) values.push_back(value);
  } else {
    for (const uint16_t bits : downloaded<uint16_t>(data, count)) {
      values.push_back(dtype == DType::kF16 ? f16_to_float(bits) : bf16_to_float(bits));
    }
  }
  return values;
}

// Computes everything on the host, in float64.
class HostExperts {
 public:
  explicit HostExperts(const CudaProblem& p)
      : o_(p.options()), sizes_(p.sizes()), gated_(sizes_.activation.gated) {
    const auto w = p.weights();
    const int64_t e = o_.num_experts;
    rows_ = (gated_ ? 2 : 1) * o_.intermediate_size;
    up_stride_ = w.gate_up.stride;
    down_stride_ = w.down.stride;
    x_stride_ = p.input().row_stride;
    up_ = decoded(w.gate_up.data, e * rows_ * up_stride_, o_.weight_dtype);
    down_ = decoded(w.down.data, e * o_.hidden_size * down_stride_, o_.weight_dtype);
    x_ = decoded(p.input().data, o_.num_tokens * x_stride_, p.input().dtype);
    if (p.input().scales != nullptr) {
      scale_stride_ = p.input().scale_stride;
      x_scales_ = downloaded<float>(p.input().scales, o_.num_tokens * scale_stride_);
    }
    if (o_.has_bias) {
      up_bias_ = downloaded<float>(w.gate_up.bias, e * rows_);
      down_bias_ = downloaded<float>(w.down.bias, e * o_.hidden_size);
    }
    if (w.gate_up.scale != nullptr) {
      up_scale_ = downloaded<float>(w.gate_up.scale,
                                    e * scales(rows_, o_.intermediate_size, o_.hidden_size));
      down_scale_ = downloaded<float>(
          w.down.scale, e * scales(o_.hidden_size, o_.hidden_size, o_.intermediate_size));
    }
    if (w.intermediate_scale != nullptr)
      static_step_ = downloaded<float>(w.intermediate_scale, 1)[0];
  }

  std::vector<double> row(int64_t token, int64_t expert) const {
    std::vector<double> activated;
    for (int64_t i = 0; i < o_.intermediate_size; ++i) {
      const double gate = gated_ ? up(token, expert, i) : 0.0;
      const double value = up(token, expert, gated_ ? o_.intermediate_size + i : i);
      activated.push_back(activation::apply_reference(sizes_.activation, gate, value));
    }
    requantize(activated);
    std::vector<double> out;
    for (int64_t h = 0; h < o_.hidden_size; ++h) {
      double sum = 0;
      for (int64_t i = 0; i < o_.intermediate_size; ++i) {
        const double scale = scale_at(down_scale_, expert, h, i, o_.hidden_size, o_.hidden_size,
                                      o_.intermediate_size);
        sum += scale * down_[at(expert * o_.hidden_size + h, down_stride_, i)] *
               activated[static_cast<size_t>(i)];
      }
      if (o_.has_bias) sum += double{down_bias_[at(expert, o_.hidden_size, h)]};
      out.push_back(sum);
    }
    return out;
  }

 private:
  static size_t at(int64_t row, int64_t stride, int64_t column) {
    return static_cast<size_t>(row * stride + column);
  }
  static int64_t blocks(int64_t n) { return (n + 127) / 128; }
  bool by_block() const { return o_.quant.weights == WeightScale::kBlock; }
  int64_t scales(int64_t rows, int64_t half, int64_t cols) const {
    return by_block() ? rows / half * blocks(half) * blocks(cols) : rows;
  }
  double scale_at(const std::vector<float>& table, int64_t expert, int64_t row, int64_t col,
                  int64_t rows, int64_t half, int64_t cols) const {
    if (table.empty()) return 1;
    if (!by_block()) return table[at(expert, rows, row)];
    const int64_t block_row =
        (expert * (rows / half) + row / half) * blocks(half) + row % half / 128;
    return table[at(block_row, blocks(cols), col / 128)];
  }
  double up(int64_t token, int64_t expert, int64_t row) const {
    double sum = 0;
    for (int64_t h = 0; h < o_.hidden_size; ++h) {
      double x = x_[at(token, x_stride_, h)];
      if (!x_scales_.empty())
        x *= x_scales_[at(token, scale_stride_, scale_stride_ == 1 ? 0 : h / 128)];
      sum += x * up_[at(expert * rows_ + row, up_stride_, h)] *
             scale_at(up_scale_, expert, row, h, rows_, o_.intermediate_size, o_.hidden_size);
    }
    return o_.has_bias ? sum + double{up_bias_[at(expert, rows_, row)]} : sum;
  }
  void requantize(std::vector<double>& row) const {
    if (o_.quant.activations == ActivationScale::kNone) return;
    const size_t group = o_.quant.activations == ActivationScale::kGroup ? 128 : row.size();
    for (size_t begin = 0; begin < row.size(); begin += group) {
      const size_t end = std::min(row.size(), begin + group);
      float amax = 0;
      for (size_t i = begin; i < end; ++i)
        amax = std::max(amax, std::abs(static_cast<float>(row[i])));
      const float step = static_step_ != 0 ? static_step_ : amax == 0 ? 1.0F : amax / 448.0F;
      for (size_t i = begin; i < end; ++i)
        row[i] = round_e4m3(row[i] / double{step}) * double{step};
    }
  }

  CudaProblemOptions o_;
  experts::ExpertsProblem sizes_;
  bool gated_;
  int64_t rows_ = 0, up_stride_ = 0, down_stride_ = 0, x_stride_ = 0, scale_stride_ = 0;
  std::vector<double> up_, down_, x_;
  std::vector<float> x_scales_, up_bias_, down_bias_, up_scale_, down_scale_;
  float static_step_ = 0;
};

void store(uint8_t* place, DType dtype, double value) {
  const auto rounded = static_cast<float>(value);
  const uint16_t half = dtype == DType::kF16 ? float_to_f16(rounded) : float_to_bf16(rounded);
  if (dtype == DType::kF32) {
    std::memcpy(place, &rounded, sizeof rounded);
  } else {
    std::memcpy(place, &half, sizeof half);
  }
}

// Host rows rounded to the output type must be within that rounding of the device oracle, a row
// with one wrong element must not, and a write outside must be detected.
bool check(const std::string& name, const CudaProblemOptions& options) {
  CudaProblem problem(options);
  const HostExperts host(problem);
  const int64_t stride = problem.row_stride();
  const auto ids = problem.host_ids(0);
  const DType dtype = problem.row_dtype();
  const auto bytes = static_cast<size_t>(byte_size(dtype));
  std::vector<uint8_t> rows(ids.size() * static_cast<size_t>(stride) * bytes, 0xff);
  double squares = 0;
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    if (ids[slot] < 0) continue;
    const auto row = host.row(static_cast<int64_t>(slot) / options.top_k, ids[slot]);
    for (size_t h = 0; h < row.size(); ++h) {
      store(&rows[(slot * static_cast<size_t>(stride) + h) * bytes], dtype, row[h]);
      squares += row[h] * row[h] / static_cast<double>(row.size() * ids.size());
    }
  }
  GuardedDevice output(static_cast<size_t>(problem.output_bytes()));
  cuda::upload(std::span<const uint8_t>(rows), output.data());
  const RowErrors right = problem.check_rows(output.data());
  bool good = within(right, dtype == DType::kF32 ? 1e-7 : 4e-3) && output.damage() == 0;

  const size_t first = static_cast<size_t>(
      std::find_if(ids.begin(), ids.end(), [](int32_t id) { return id >= 0; }) - ids.begin());
  store(&rows[first * static_cast<size_t>(stride) * bytes], dtype, NAN);
  cuda::upload(std::span<const uint8_t>(rows), output.data());
  good &= !within(problem.check_rows(output.data()), 1e30);
  std::printf("%-28s rms %.2f  %s  %s\n", name.c_str(), std::sqrt(squares),
              right.describe().c_str(), good ? "good" : "FAILED");
  return good;
}

// Checks a weighted sum made from host rows with check_tokens.
bool check_sums(const CudaProblemOptions& options) {
  CudaProblem problem(options);
  const HostExperts host(problem);
  const int64_t h = options.hidden_size;
  std::vector<float> sums(static_cast<size_t>(options.num_tokens * h));
  for (int64_t token = 0; token < options.num_tokens; ++token) {
    std::vector<double> sum(static_cast<size_t>(h));
    for (int64_t slot = token * options.top_k; slot < (token + 1) * options.top_k; ++slot) {
      const int32_t id = problem.host_ids(0)[static_cast<size_t>(slot)];
      if (id < 0) continue;
      const auto row = host.row(token, id);
      const double weight = problem.host_weights(0)[static_cast<size_t>(slot)];
      for (size_t i = 0; i < row.size(); ++i) sum[i] += weight * row[i];
    }
    for (int64_t i = 0; i < h; ++i) {
      sums[static_cast<size_t>(token * h + i)] =
          static_cast<float>(2.5 * sum[static_cast<size_t>(i)]);
    }
  }
  GuardedDevice output(sums.size() * sizeof(float));
  cuda::upload(std::span<const float>(sums), output.data());
  const RowErrors errors = problem.check_tokens({.data = output.data(),
                                                 .rows = options.num_tokens,
                                                 .cols = h,
                                                 .stride = h,
                                                 .dtype = DType::kF32},
                                                2.5);
  std::printf("%-28s %s\n", "token sums", errors.describe().c_str());
  return within(errors, 1e-6);
}

bool check_guards() {
  GuardedDevice memory(1000);
  bool good = memory.damage() == 0;
  cuda::check(cudaMemset(memory.data() + 1000, 0, 3), "cudaMemset");
  good &= memory.damage() == 3;
  const GuardedDevice rows(8 * 64);
  const OutputRows output{.data = rows.data(), .rows = 4, .cols = 60, .stride = 64};
  cuda::check(cudaMemset(rows.data() + 2 * 59, 0, 4), "cudaMemset");
  good &= count_stray(output, std::vector<uint8_t>{1, 0, 0, 1}) == 1;
  good &= count_stray(output, std::vector<uint8_t>{0, 0, 0, 1}) == 2;
  std::printf("guards %s\n", good ? "good" : "FAILED");
  return good;
}

bool run() {
  const CudaProblemOptions base{.num_experts = 6,
                                .top_k = 2,
                                .hidden_size = 200,
                                .intermediate_size = 136,
                                .num_tokens = 5,
                                .routing = RoutingKind::kHoles};
  bool good = check_guards();
  auto with = [&](auto change) {
    CudaProblemOptions options = base;
    change(options);
    return options;
  };
  good &= check("bf16", base);
  good &= check("f16", with([](auto& o) { o.weight_dtype = DType::kF16; }));
  good &= check("f32", with([](auto& o) { o.weight_dtype = DType::kF32; }));
  for (const char* name :
       {"gelu", "gelu_tanh", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"}) {
    good &= check(name, with([&](auto& o) { o.activation.name = name; }));
  }
  good &= check("swiglu_oai, bias", with([](auto& o) {
                  o.has_bias = true;
                  o.activation = {.name = "swiglu_oai", .limit = 1.5, .alpha = 1.702, .beta = 1};
                }));
  good &= check("silu_clamp_before",
                with([](auto& o) { o.activation = {.name = "silu_clamp_before", .limit = 0.7}; }));
  good &= check("silu_clamp_after",
                with([](auto& o) { o.activation = {.name = "silu_clamp_after", .limit = 0.5}; }));
  good &= check(
      "situ", with([](auto& o) { o.activation = {.name = "situ", .beta = 4, .linear_beta = 25}; }));
  const auto fp8 = [&](const char* name, const QuantSpec& quant) {
    return check(name, with([&](auto& o) {
                   o.weight_dtype = DType::kF8E4M3;
                   o.quant = quant;
                 }));
  };
  good &= fp8("fp8 block", fp8_block_quant());
  good &= fp8("fp8 channel", fp8_channel_quant());
  good &= fp8("fp8 static", fp8_static_quant());
  good &= fp8("fp8 weights only", {.weights = WeightScale::kChannel});
  good &= check_sums(base);
  const RoutingKind kinds[] = {RoutingKind::kZipf, RoutingKind::kOneHot};
  for (const RoutingKind kind : kinds) {
    good &= check("routing", with([&](auto& o) { o.routing = kind; }));
  }
  return good;
}

}  // namespace

int main() {
  try {
    const bool good = run();
    std::printf("%s\n", good ? "all good" : "FAILED");
    return good ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
