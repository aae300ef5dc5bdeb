// Compares the gate product on the device with float64, and its kernels with each other.
#include "gemm/cuda/gate_product.h"

#include "core/float_convert.h"
#include "gemm/cuda/catalog.h"
#include "support/cuda/device_array.h"
#include "support/tolerance.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::gemm {
namespace {

using testing::DeviceArray;

float rounded(float value, DType dtype) {
  if (dtype == DType::kF16) return f16_to_float(float_to_f16(value));
  if (dtype == DType::kBF16) return bf16_to_float(float_to_bf16(value));
  return value;
}

struct GateProblem {
  int64_t num_tokens = 3;
  int64_t hidden_size = 64;
  int64_t num_logits = 8;
  DType rows_dtype = DType::kBF16;
  DType weights_dtype = DType::kBF16;
  DType logits_dtype = DType::kF32;
  int64_t extra_stride = 0;  // for rows and weights
  bool has_bias = false;
  bool has_norm = false;
  std::vector<float> rows = {};     // [T, H]
  std::vector<float> weights = {};  // [N, H]
  std::vector<float> bias = {};
  std::vector<float> norm_weight = {};
};

constexpr double kEpsilon = 1e-6;

std::vector<float> random_floats(int64_t count, DType dtype, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = rounded(normal(generator), dtype);
  return values;
}

GateProblem filled(GateProblem problem, uint32_t seed) {
  std::mt19937 generator(seed);
  const int64_t hidden = problem.hidden_size;
  problem.rows = random_floats(problem.num_tokens * hidden, problem.rows_dtype, generator);
  problem.weights = random_floats(problem.num_logits * hidden, problem.weights_dtype, generator);
  if (problem.has_bias) problem.bias = random_floats(problem.num_logits, DType::kF32, generator);
  if (problem.has_norm) problem.norm_weight = random_floats(hidden, DType::kF32, generator);
  return problem;
}

std::string describe(const GateProblem& p) {
  return "T " + std::to_string(p.num_tokens) + ", H " + std::to_string(p.hidden_size) + " + " +
         std::to_string(p.extra_stride) + ", N " + std::to_string(p.num_logits) + ", types " +
         std::string(to_string(p.rows_dtype)) + " x " + std::string(to_string(p.weights_dtype)) +
         " -> " + std::string(to_string(p.logits_dtype)) + ", norm " + std::to_string(p.has_norm);
}

// Stores rows in the type, with the given stride and NaN between them.
std::vector<uint8_t> store(const std::vector<float>& values, DType dtype, int64_t columns,
                           int64_t stride) {
  const auto element = static_cast<size_t>(byte_size(dtype));
  const int64_t rows = static_cast<int64_t>(values.size()) / columns;
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * stride) * element, 0xff);
  for (int64_t i = 0; i < rows * columns; ++i) {
    const float value = values[static_cast<size_t>(i)];
    const uint16_t half = dtype == DType::kF16 ? float_to_f16(value) : float_to_bf16(value);
    const auto at = static_cast<size_t>(i / columns * stride + i % columns) * element;
    std::memcpy(bytes.data() + at, element == 4 ? static_cast<const void*>(&value) : &half,
                element);
  }
  return bytes;
}

// The rows that the gate reads: the given ones, or normed as the host norms them.
std::vector<float> gate_rows(const GateProblem& problem) {
  if (!problem.has_norm) return problem.rows;
  std::vector<float> normed(problem.rows.size());
  const auto width = static_cast<double>(problem.hidden_size);
  for (size_t begin = 0; begin < normed.size(); begin += problem.norm_weight.size()) {
    double squares = 0;
    for (size_t c = 0; c < problem.norm_weight.size(); ++c) {
      squares += double{problem.rows[begin + c]} * double{problem.rows[begin + c]};
    }
    const double factor = 1.0 / (std::sqrt(squares / width + kEpsilon) * std::sqrt(width));
    for (size_t c = 0; c < problem.norm_weight.size(); ++c) {
      normed[begin + c] = static_cast<float>(double{problem.rows[begin + c]} * factor *
                                             double{problem.norm_weight[c]});
    }
  }
  return normed;
}

class DeviceGate : public testing::DeviceTest {
 protected:
  // By the kernel that a plan chooses.
  std::vector<float> run(const GateProblem& problem) {
    const auto ladder = gate_ladder(
        {.num_logits = problem.num_logits, .max_tokens = std::max<int64_t>(problem.num_tokens, 1)});
    return run(problem, ladder.back().row->kernel);
  }

  std::vector<float> run(const GateProblem& problem, GateKernel kernel) {
    const int64_t stride = problem.hidden_size + problem.extra_stride;
    const DeviceArray<uint8_t> rows(
        store(problem.rows, problem.rows_dtype, problem.hidden_size, stride));
    const DeviceArray<uint8_t> weights(
        store(problem.weights, problem.weights_dtype, problem.hidden_size, stride));
    const DeviceArray<float> bias(problem.bias);
    const DeviceArray<float> norm_weight(problem.norm_weight);
    const DeviceArray<uint8_t> workspace(
        device_gate_workspace_bytes(problem.num_tokens, problem.hidden_size, problem.has_norm));
    const DeviceArray<float> logits(static_cast<size_t>(problem.num_tokens * problem.num_logits));
    const DeviceGateArgs args{.rows = rows.data(),
                              .rows_dtype = problem.rows_dtype,
                              .rows_stride = stride,
                              .num_tokens = problem.num_tokens,
                              .hidden_size = problem.hidden_size,
                              .weights = weights.data(),
                              .weights_dtype = problem.weights_dtype,
                              .weights_stride = stride,
                              .num_logits = problem.num_logits,
                              .bias = or_null(bias),
                              .logits_dtype = problem.logits_dtype,
                              .norm_weight = or_null(norm_weight),
                              .norm_epsilon = kEpsilon,
                              .workspace = workspace.data(),
                              .logits = logits.data()};
    prepare_gate_product(kernel, problem.weights_dtype);
    device_gate_product(args, kernel, stream());
    wait();
    logits.expect_guard_untouched();
    workspace.expect_guard_untouched();
    return logits.download();
  }
};

// The bar is |error| <= product_error(H) |x| |w| (+ |b|), plus one rounding to the type of the
// logits, which that type holds exactly.
void expect_near_float64(const GateProblem& problem, const std::vector<float>& actual) {
  const std::vector<float> rows = gate_rows(problem);
  const auto hidden = static_cast<size_t>(problem.hidden_size);
  const auto logits = static_cast<size_t>(problem.num_logits);
  for (size_t at = 0; at < actual.size(); ++at) {
    const float* x = rows.data() + at / logits * hidden;
    const float* w = problem.weights.data() + at % logits * hidden;
    double exact = problem.bias.empty() ? 0.0 : double{problem.bias[at % logits]};
    double x_squares = 0;
    double w_squares = 0;
    for (size_t c = 0; c < hidden; ++c) {
      exact += double{x[c]} * double{w[c]};
      x_squares += double{x[c]} * double{x[c]};
      w_squares += double{w[c]} * double{w[c]};
    }
    const double scale = std::sqrt(x_squares) * std::sqrt(w_squares) + std::abs(exact);
    double bar = testing::product_error(problem.hidden_size, DType::kF32) * scale;
    if (problem.logits_dtype != DType::kF32) {
      bar += testing::unit_roundoff(problem.logits_dtype) * (std::abs(exact) + bar);
    }
    ASSERT_NEAR(actual[at], exact, bar) << "token " << at / logits << ", logit " << at % logits;
    ASSERT_EQ(actual[at], rounded(actual[at], problem.logits_dtype)) << "at " << at;
  }
}

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST_F(DeviceGate, EveryPairOfTypes_IsNearFloat64InEveryKernel) {
  for (const DType rows : kTypes) {
    for (const DType weights : kTypes) {
      for (const DType logits : kTypes) {
        const GateProblem problem = filled({.num_tokens = 37,
                                            .hidden_size = 520,
                                            .num_logits = 70,
                                            .rows_dtype = rows,
                                            .weights_dtype = weights,
                                            .logits_dtype = logits,
                                            .has_bias = true},
                                           1);
        SCOPED_TRACE(describe(problem));
        const std::vector<float> few = run(problem, GateKernel::kFewTokens);
        expect_near_float64(problem, few);
        ASSERT_EQ(few, run(problem, GateKernel::kSomeTokens));
        ASSERT_EQ(few, run(problem, GateKernel::kManyTokens));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(DeviceGate, SizesAndStridesOfAllKinds_AreNearFloat64) {
  for (const int64_t hidden : {1, 7, 8, 31, 32, 33, 64, 511, 2048}) {
    for (const int64_t extra : {0, 1, 8}) {
      for (const int64_t logits : {1, 6, 8, 60, 65}) {
        const GateProblem problem = filled({.num_tokens = 1 + hidden % 18,
                                            .hidden_size = hidden,
                                            .num_logits = logits,
                                            .extra_stride = extra},
                                           static_cast<uint32_t>(hidden));
        SCOPED_TRACE(describe(problem));
        const std::vector<float> few = run(problem, GateKernel::kFewTokens);
        expect_near_float64(problem, few);
        ASSERT_EQ(few, run(problem, GateKernel::kSomeTokens));
        ASSERT_EQ(few, run(problem, GateKernel::kManyTokens));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(DeviceGate, InputNorm_IsNearFloat64) {
  for (const DType rows : kTypes) {
    for (const int64_t hidden : {5, 64, 300}) {
      const GateProblem problem = filled({.num_tokens = 19,
                                          .hidden_size = hidden,
                                          .num_logits = 12,
                                          .rows_dtype = rows,
                                          .has_norm = true},
                                         7);
      SCOPED_TRACE(describe(problem));
      expect_near_float64(problem, run(problem));
      if (HasFailure()) return;
    }
  }
}

TEST_F(DeviceGate, ATokensLogits_DoNotDependOnTheOthers) {
  const GateProblem all = filled({.num_tokens = 5000, .hidden_size = 256, .num_logits = 128}, 2);
  const std::vector<float> together = run(all);
  for (const int64_t token : {0, 1, 17, 2047, 4999}) {
    GateProblem alone = all;
    alone.num_tokens = 1;
    alone.rows.assign(all.rows.begin() + token * 256, all.rows.begin() + (token + 1) * 256);
    const std::vector<float> wanted(together.begin() + token * 128,
                                    together.begin() + (token + 1) * 128);
    ASSERT_EQ(run(alone), wanted) << "token " << token;
  }
}

TEST_F(DeviceGate, NanAndInfInARow_StayInThatRow) {
  for (const DType rows : kTypes) {
    const GateProblem clean =
        filled({.num_tokens = 40, .hidden_size = 96, .num_logits = 16, .rows_dtype = rows}, 3);
    const std::vector<float> wanted = run(clean);
    GateProblem dirty = clean;
    dirty.rows[5 * 96 + 95] = std::numeric_limits<float>::quiet_NaN();
    dirty.rows[9 * 96] = std::numeric_limits<float>::infinity();
    const std::vector<float> actual = run(dirty);
    for (size_t at = 0; at < actual.size(); ++at) {
      const size_t token = at / 16;
      if (token == 5 || token == 9) {
        ASSERT_FALSE(std::isfinite(actual[at])) << "at " << at;
      } else {
        ASSERT_EQ(actual[at], wanted[at]) << "at " << at;
      }
    }
  }
}

TEST_F(DeviceGate, NoTokens_IsAnOrdinaryCall) {
  EXPECT_TRUE(run(filled({.num_tokens = 0}, 1)).empty());
}

TEST_F(DeviceGate, OtherTypes_AreATypedError) {
  EXPECT_THROW(device_gate_product({.rows_dtype = DType::kI32}, GateKernel::kFewTokens, stream()),
               Error);
}

}  // namespace
}  // namespace conclave::gemm
