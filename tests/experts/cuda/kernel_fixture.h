// Shared by tests of device kernels: formats, texts for failures, and a fixture that needs a Hopper
// GPU and reports the worst error.
#pragma once

#include "cuda/check.h"
#include "cuda/device_info.h"
#include "support/cuda/cuda_problem.h"
#include "support/cuda/guarded_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave::testing {

struct KernelFormat {
  std::string name;
  DType dtype = DType::kBF16;
  QuantSpec quant = {};
  double tolerance = 6e-3;
};

// Every format that a kernel may support; only the reference supports float32.
inline std::vector<KernelFormat> kernel_formats() {
  QuantSpec power_of_two = fp8_block_quant();
  power_of_two.power_of_two_scales = true;
  return {{"bf16", DType::kBF16},
          {"f16", DType::kF16},
          {"f32", DType::kF32, {}, 5e-6},
          {"fp8 block", DType::kF8E4M3, fp8_block_quant()},
          {"fp8 block, powers of two", DType::kF8E4M3, power_of_two},
          {"fp8 channel", DType::kF8E4M3, fp8_channel_quant()},
          {"fp8 static", DType::kF8E4M3, fp8_static_quant()},
          {"fp8 weights only", DType::kF8E4M3, {.weights = WeightScale::kChannel}}};
}

// The formats among them whose rows are codes.
inline std::vector<KernelFormat> coded_formats() {
  std::vector<KernelFormat> formats = kernel_formats();
  std::erase_if(formats, [](const KernelFormat& format) {
    return format.quant.activations == ActivationScale::kNone;
  });
  return formats;
}

inline CudaProblemOptions with_format(CudaProblemOptions options, const KernelFormat& format) {
  options.weight_dtype = format.dtype;
  options.quant = format.quant;
  return options;
}

inline std::string text_of(const CudaProblemOptions& o) {
  return o.activation.name + " E=" + std::to_string(o.num_experts) +
         " k=" + std::to_string(o.top_k) + " H=" + std::to_string(o.hidden_size) +
         " I=" + std::to_string(o.intermediate_size) + " T=" + std::to_string(o.num_tokens) +
         (o.has_bias ? " bias" : "") + " routing " + std::to_string(static_cast<int>(o.routing));
}

// All activations, with parameters that make a difference in rows with deviation 1.
inline std::vector<ActivationSpec> kernel_activations() {
  return {{.name = "silu"},
          {.name = "gelu"},
          {.name = "gelu_tanh"},
          {.name = "swiglu_oai", .limit = 7, .alpha = 1.702, .beta = 1},
          {.name = "swiglu_oai", .limit = 0.5, .alpha = 1.702, .beta = 1},
          {.name = "silu_clamp_before", .limit = 0.7},
          {.name = "silu_clamp_after", .limit = 0.5},
          {.name = "situ", .beta = 4, .linear_beta = 25},
          {.name = "situ", .beta = 1},
          {.name = "silu_no_mul"},
          {.name = "gelu_no_mul"},
          {.name = "gelu_tanh_no_mul"},
          {.name = "relu2_no_mul"}};
}

// A formula with a gate and one without, which is 0 for about half of its values.
inline std::vector<ActivationSpec> gated_and_plain() {
  return {{.name = "silu"}, {.name = "relu2_no_mul"}};
}

// With this CudaProblemOptions::up_exponent the steps of intermediate codes are below 2^-128, so
// that their inverses are beyond float32.
inline constexpr int kTinyExponent = -62;

// Odd and even sizes, few and many tokens, every way tokens may fall on experts: small enough to
// run under compute-sanitizer.
inline std::vector<CudaProblemOptions> small_shapes() {
  const int64_t hidden[] = {64, 72, 131, 200, 264, 40};
  const int64_t inner[] = {32, 67, 136, 96, 24};
  const int64_t tokens[] = {1, 2, 7, 8, 9, 17, 33, 70};
  const RoutingKind kinds[] = {RoutingKind::kUniform, RoutingKind::kZipf, RoutingKind::kOneHot,
                               RoutingKind::kHoles};
  std::vector<CudaProblemOptions> shapes;
  for (size_t i = 0; i < 32; ++i) {
    const auto experts = static_cast<int64_t>(1 + i * 7 % 10);
    shapes.push_back({.num_experts = experts,
                      .top_k = std::min(experts, static_cast<int64_t>(1 + i % 5)),
                      .hidden_size = hidden[i % 6],
                      .intermediate_size = inner[i % 5],
                      .num_tokens = tokens[i % 8],
                      .activation = kernel_activations()[i % 13],
                      .has_bias = i % 3 == 0,
                      .routing = kinds[i % 4],
                      .seed = i + 1});
  }
  return shapes;
}

// Whether row `row` of `rows` has the same bits in both outputs.
inline bool same_row(const std::vector<std::byte>& a, const std::vector<std::byte>& b, int64_t row,
                     int64_t rows) {
  const auto row_bytes = static_cast<int64_t>(a.size()) / rows;
  const auto begin = a.begin() + row * row_bytes;
  return std::equal(begin, begin + row_bytes, b.begin() + row * row_bytes);
}

inline std::vector<std::byte> bits_of(const GuardedDevice& memory) {
  std::vector<std::byte> result(memory.bytes());
  cuda::copy_to_host(memory.data(), result);
  return result;
}

// A base beside the test class, which brings ::testing::Test itself.
class HopperFixture {
 protected:
  // Returns an empty text if the machine can run such tests.
  static std::string reason_to_skip() {
    const cuda::DeviceCount devices = cuda::count_devices();
    if (devices.count == 0) return devices.reason;
    return cuda::device_info(0).capability == cuda::kHopper ? "" : "cuda:0 is no Hopper GPU";
  }
  void note(const RowErrors& errors) {
    worst_ = std::max(worst_, errors.worst);
    excess_ = std::max(excess_, errors.excess);
    ++checked_;
  }
  void record() const {
    if (checked_ == 0) return;
    ::testing::Test::RecordProperty("checked", checked_);
    ::testing::Test::RecordProperty("worst row", std::to_string(worst_));
    ::testing::Test::RecordProperty("beyond ambiguous codes", std::to_string(excess_));
  }

 private:
  int checked_ = 0;
  double worst_ = 0;
  double excess_ = 0;
};

}  // namespace conclave::testing
