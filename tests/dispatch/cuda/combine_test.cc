// Compares the weighted sum on the device with the same sum on the host, bit for bit.
#include "dispatch/cuda/combine.h"

#include "core/float_convert.h"
#include "support/cuda/device_array.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::dispatch {
namespace {

using testing::DeviceArray;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A matrix of one of the three types, with the values that its elements hold after rounding.
struct Matrix {
  DType dtype = DType::kBF16;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
  std::vector<uint8_t> bytes = {};
  std::vector<float> values = {};  // [rows, columns]

  void set(int64_t row, int64_t column, float value) {
    const auto at = static_cast<size_t>(row * stride + column);
    auto* data = static_cast<void*>(bytes.data());
    if (dtype == DType::kF32) {
      static_cast<float*>(data)[at] = value;
    } else {
      const bool half = dtype == DType::kF16;
      const uint16_t bits = half ? float_to_f16(value) : float_to_bf16(value);
      static_cast<uint16_t*>(data)[at] = bits;
      value = half ? f16_to_float(bits) : bf16_to_float(bits);
    }
    values[static_cast<size_t>(row * columns + column)] = value;
  }
  float at(int64_t row, int64_t column) const {
    return values[static_cast<size_t>(row * columns + column)];
  }
};

Matrix poisoned(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  Matrix matrix{.dtype = dtype, .rows = rows, .columns = columns, .stride = stride};
  matrix.bytes.assign(static_cast<size_t>(rows * stride * byte_size(dtype)), testing::kPoison);
  matrix.values.assign(static_cast<size_t>(rows * columns), 0.0F);
  return matrix;
}

Matrix random_matrix(DType dtype, int64_t rows, int64_t columns, int64_t stride,
                     std::mt19937& generator) {
  Matrix matrix = poisoned(dtype, rows, columns, stride);
  std::normal_distribution<float> normal;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) matrix.set(r, c, normal(generator));
  }
  return matrix;
}

struct CombineProblem {
  int64_t num_tokens = 1;
  int32_t top_k = 2;
  int32_t num_experts = 8;
  int64_t hidden_size = 64;
  DType expert_dtype = DType::kBF16;
  DType other_dtype = DType::kBF16;  // for out, hidden and shared rows
  int64_t extra_stride = 0;          // for the caller's tensors
  int64_t live = -1;
  bool weighted = true;
  bool has_identity = false;
  bool has_bias = false;
  bool has_map = false;
  bool has_mask = false;
  int32_t num_shared = 0;
  bool shared_factors = false;
  bool shared_apart = false;
  int32_t shared_slots = 0;  // included in top_k
  bool has_mix = false;
  bool has_routed = false;
  bool has_residual = false;
  float output_scale = 1;
};

struct CombineData {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<int32_t> map;
  std::vector<float> identity;
  std::vector<float> bias;
  std::vector<float> factors;
  std::vector<float> mix;
  std::vector<float> routed;
  std::vector<uint8_t> mask;
  Matrix experts;
  Matrix hidden;
  Matrix shared;
  Matrix residual;
};

std::vector<float> random_floats(int64_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

CombineData make_data(const CombineProblem& problem, uint32_t seed) {
  std::mt19937 generator(seed);
  const int64_t tokens = problem.num_tokens;
  const int64_t slots = tokens * problem.top_k;
  const int64_t stride = problem.hidden_size + problem.extra_stride;
  CombineData data;
  for (int64_t i = 0; i < slots; ++i) {
    data.ids.push_back(static_cast<int32_t>(generator() % 10) - 1);  // -1, 8 and 9 have no expert
  }
  data.weights = random_floats(slots, generator);
  for (size_t i = 0; i < data.weights.size(); i += 7) data.weights[i] = 0;
  if (problem.has_routed) data.routed = random_floats(tokens * problem.hidden_size, generator);
  if (problem.has_mix) data.mix = random_floats(tokens, generator);
  if (problem.has_map) data.map = {0, -1, 1, 2, -1, 3, 4, 5};
  if (problem.has_identity) {
    data.identity = random_floats(tokens, generator);
    if (tokens > 1) data.identity[1] = 0;
  }
  if (problem.has_bias) data.bias = random_floats(problem.hidden_size, generator);
  if (problem.has_mask) {
    for (int64_t t = 0; t < tokens; ++t) data.mask.push_back(generator() % 3 != 0 ? 1 : 0);
  }
  if (problem.shared_factors) data.factors = random_floats(tokens * problem.num_shared, generator);
  data.experts = random_matrix(problem.expert_dtype, slots, problem.hidden_size,
                               (problem.hidden_size + 7) / 8 * 8, generator);
  for (int64_t i = 0; i < slots && problem.weighted; ++i) {
    // So does a weight of 0 in a shared slot.
    const bool is_shared = i % problem.top_k >= problem.top_k - problem.shared_slots;
    if (is_shared && data.weights[static_cast<size_t>(i)] == 0) data.experts.set(i, 0, kNan);
  }
  data.hidden = random_matrix(problem.other_dtype, tokens, problem.hidden_size, stride, generator);
  data.shared = random_matrix(problem.other_dtype, tokens * problem.num_shared, problem.hidden_size,
                              stride, generator);
  if (problem.shared_factors && problem.num_shared > 0 && tokens > 0) {
    // A factor of 0 keeps out values that are not finite.
    data.factors[0] = 0;
    data.shared.set(0, 0, std::numeric_limits<float>::infinity());
  }
  data.residual = random_matrix(problem.other_dtype, problem.has_residual ? tokens : 0,
                                problem.hidden_size, stride, generator);
  return data;
}

bool goes_somewhere(const CombineProblem& problem, const CombineData& data, size_t slot) {
  const int32_t id = data.ids[slot];
  if (id < 0 || id >= problem.num_experts) return false;
  return data.map.empty() || data.map[static_cast<size_t>(id)] >= 0;
}

struct Combined {
  Matrix out;
  Matrix shared_out;
};

// Rows from `live` on stay poisoned.
Combined expected(const CombineProblem& problem, const CombineData& data) {
  const int64_t tokens = problem.num_tokens;
  const int64_t stride = problem.hidden_size + problem.extra_stride;
  Combined result{.out = poisoned(problem.other_dtype, tokens, problem.hidden_size, stride),
                  .shared_out = poisoned(problem.other_dtype, tokens, problem.hidden_size, stride)};
  const int64_t live = problem.live < 0 ? tokens : problem.live;
  for (int64_t t = 0; t < live; ++t) {
    const auto token = static_cast<size_t>(t);
    const bool active = data.mask.empty() || data.mask[token] != 0;
    for (int64_t c = 0; c < problem.hidden_size; ++c) {
      float sum =
          problem.has_routed ? data.routed[static_cast<size_t>(t * problem.hidden_size + c)] : 0.0F;
      float shared = 0;
      const auto add_slots = [&](int32_t begin, int32_t end, float& to) {
        for (int32_t s = begin; s < end; ++s) {
          const auto slot = static_cast<size_t>(t * problem.top_k + s);
          if (!goes_somewhere(problem, data, slot)) continue;
          const float weight = problem.weighted ? data.weights[slot] : 1.0F;
          if (weight == 0.0F && begin > 0) continue;
          to += weight * data.experts.at(static_cast<int64_t>(slot), c);
        }
      };
      add_slots(0, problem.top_k - problem.shared_slots, sum);
      sum *= problem.output_scale;
      if (problem.has_identity) sum += data.identity[token] * data.hidden.at(t, c);
      if (problem.has_bias) sum += data.bias[static_cast<size_t>(c)];
      if (problem.has_mix) sum *= data.mix[token];
      float& to = problem.shared_apart ? shared : sum;
      if (problem.shared_slots > 0) {
        add_slots(problem.top_k - problem.shared_slots, problem.top_k, to);
      }
      for (int32_t i = 0; i < problem.num_shared; ++i) {
        const int64_t row = t * problem.num_shared + i;
        const float factor = problem.shared_factors ? data.factors[static_cast<size_t>(row)] : 0.5F;
        if (factor != 0.0F) to += factor * data.shared.at(row, c);
      }
      if (problem.has_residual) sum += data.residual.at(t, c);
      result.out.set(t, c, active ? sum : 0.0F);
      if (problem.shared_apart) result.shared_out.set(t, c, active ? shared : 0.0F);
    }
  }
  return result;
}

class DeviceCombine : public testing::DeviceTest {
 protected:
  struct Result {
    std::vector<uint8_t> out;
    std::vector<uint8_t> shared_out;
  };
  Result run(const CombineProblem& problem, const CombineData& data) {
    const DeviceArray<int32_t> ids(data.ids);
    const DeviceArray<float> weights(data.weights);
    const DeviceArray<int32_t> map(data.map);
    const DeviceArray<float> identity(data.identity);
    const DeviceArray<float> bias(data.bias);
    const DeviceArray<float> factors(data.factors);
    const DeviceArray<float> mix(data.mix);
    const DeviceArray<float> routed(data.routed);
    const DeviceArray<uint8_t> residual(data.residual.bytes);
    const DeviceArray<uint8_t> mask(data.mask);
    const DeviceArray<uint8_t> experts(data.experts.bytes);
    const DeviceArray<uint8_t> hidden(data.hidden.bytes);
    const DeviceArray<uint8_t> shared(data.shared.bytes);
    const DeviceArray<int64_t> live(std::vector<int64_t>{problem.live});
    const DeviceArray<uint8_t> out(data.hidden.bytes.size());
    const DeviceArray<uint8_t> shared_out(data.hidden.bytes.size());
    device_combine({.expert_rows = experts.data(),
                    .expert_dtype = problem.expert_dtype,
                    .expert_row_stride = data.experts.stride,
                    .topk_ids = ids.data(),
                    .topk_weights = problem.weighted ? weights.data() : nullptr,
                    .local_expert = or_null(map),
                    .num_experts = problem.num_experts,
                    .num_tokens = problem.num_tokens,
                    .live_tokens = problem.live < 0 ? nullptr : live.data(),
                    .top_k = problem.top_k,
                    .shared_slots = problem.shared_slots,
                    .routed_rows = or_null(routed),
                    .routed_row_stride = problem.hidden_size,
                    .hidden_size = problem.hidden_size,
                    .output_scale = problem.output_scale,
                    .routed_factors = or_null(mix),
                    .identity = or_null(identity),
                    .hidden = hidden.data(),
                    .hidden_dtype = problem.other_dtype,
                    .hidden_stride = data.hidden.stride,
                    .output_bias = or_null(bias),
                    .shared_rows = problem.num_shared == 0 ? nullptr : shared.data(),
                    .shared_dtype = problem.other_dtype,
                    .shared_row_stride = data.shared.stride,
                    .num_shared = problem.num_shared,
                    .shared_factor = or_null(factors),
                    .shared_constant = 0.5F,
                    .residual_rows = problem.has_residual ? residual.data() : nullptr,
                    .residual_dtype = problem.other_dtype,
                    .residual_row_stride = data.residual.stride,
                    .padding_mask = static_cast<const bool*>(static_cast<void*>(or_null(mask))),
                    .out = out.data(),
                    .out_dtype = problem.other_dtype,
                    .out_stride = data.hidden.stride,
                    .shared_out = problem.shared_apart ? shared_out.data() : nullptr,
                    .shared_out_dtype = problem.other_dtype,
                    .shared_out_stride = data.hidden.stride},
                   stream());
    wait();
    out.expect_guard_untouched();
    shared_out.expect_guard_untouched();
    return {out.download(), shared_out.download()};
  }
};

std::string describe(const CombineProblem& p) {
  return "T " + std::to_string(p.num_tokens) + ", k " + std::to_string(p.top_k) + ", H " +
         std::to_string(p.hidden_size) + " + " + std::to_string(p.extra_stride) + ", types " +
         std::string(to_string(p.expert_dtype)) + " " + std::string(to_string(p.other_dtype)) +
         ", shared " + std::to_string(p.num_shared) + ", live " + std::to_string(p.live);
}

TEST_F(DeviceCombine, RandomProblems_HaveTheBitsOfTheHost) {
  const std::vector<DType> types = {DType::kF32, DType::kF16, DType::kBF16};
  const std::vector<int64_t> widths = {1, 7, 8, 64, 250, 256, 257, 1000, 2048};
  const std::vector<int32_t> choices = {1, 2, 3, 5, 8, 9, 32, 40};
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 generator(seed);
    const auto flip = [&] { return generator() % 2 == 0; };
    CombineProblem problem{.num_tokens = std::vector<int64_t>{0, 1, 2, 5, 33, 65}[seed % 6],
                           .top_k = choices[generator() % choices.size()],
                           .hidden_size = widths[generator() % widths.size()],
                           .expert_dtype = types[generator() % 3],
                           .other_dtype = types[generator() % 3],
                           .extra_stride = std::vector<int64_t>{0, 8, 3}[generator() % 3],
                           .weighted = generator() % 8 != 0,
                           .has_identity = flip(),
                           .has_bias = flip(),
                           .has_map = flip(),
                           .has_mask = flip(),
                           .num_shared = static_cast<int32_t>(generator() % 3),
                           .shared_factors = flip(),
                           .shared_apart = flip(),
                           .has_mix = flip(),
                           .has_routed = flip(),
                           .has_residual = flip(),
                           .output_scale = flip() ? 1.0F : 1.7F};
    if (problem.top_k > 1 && flip()) problem.shared_slots = 1 + problem.top_k / 3;
    if (flip()) problem.live = problem.num_tokens / 2;
    if (problem.num_shared == 0) problem.shared_factors = false;
    const CombineData data = make_data(problem, seed);
    const Combined wanted = expected(problem, data);
    const Result actual = run(problem, data);
    ASSERT_EQ(actual.out, wanted.out.bytes) << "seed " << seed << ": " << describe(problem);
    ASSERT_EQ(actual.shared_out, wanted.shared_out.bytes)
        << "shared, seed " << seed << ": " << describe(problem);
  }
}

// There are enough columns for the shapes that take several parts of a row at once.
TEST_F(DeviceCombine, ManyTokens_HaveTheBitsOfTheHost) {
  for (const int32_t top_k : {1, 2, 3, 4, 6}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      CombineProblem problem{.num_tokens = 1033,
                             .top_k = top_k,
                             .hidden_size = 1030,
                             .expert_dtype = dtype,
                             .has_identity = true,
                             .has_bias = true,
                             .has_mask = true,
                             .num_shared = 1,
                             .shared_apart = top_k == 2,
                             .shared_slots = top_k / 3,
                             .has_residual = top_k == 4};
      if (top_k == 3) problem.live = 1000;
      const CombineData data = make_data(problem, 4);
      const Combined wanted = expected(problem, data);
      const Result actual = run(problem, data);
      ASSERT_EQ(actual.out, wanted.out.bytes) << describe(problem);
      ASSERT_EQ(actual.shared_out, wanted.shared_out.bytes) << describe(problem);
    }
  }
}

// The rows are so far apart that element offsets pass 2^31 and byte offsets 2^32.
TEST_F(DeviceCombine, RowsBeyondTwoToThe31_AreFound) {
  const CombineProblem problem{.num_tokens = 600, .top_k = 4, .hidden_size = 64};
  CombineData data = make_data(problem, 9);
  const Combined wanted = expected(problem, data);
  constexpr int64_t kStride = int64_t{1} << 20;
  const int64_t slots = problem.num_tokens * problem.top_k;
  static_assert(2400 * kStride > (int64_t{1} << 31));
  const cuda::DeviceBuffer rows(static_cast<size_t>(slots * kStride * 2));
  for (int64_t slot = 0; slot < slots; ++slot) {
    const auto* row = data.experts.bytes.data() + slot * data.experts.stride * 2;
    cuda::upload(std::span<const uint8_t>(row, 128), rows.data() + slot * kStride * 2);
  }
  const DeviceArray<int32_t> ids(data.ids);
  const DeviceArray<float> weights(data.weights);
  const DeviceArray<uint8_t> out(wanted.out.bytes.size());
  device_combine({.expert_rows = rows.data(),
                  .expert_row_stride = kStride,
                  .topk_ids = ids.data(),
                  .topk_weights = weights.data(),
                  .num_experts = problem.num_experts,
                  .num_tokens = problem.num_tokens,
                  .top_k = problem.top_k,
                  .hidden_size = problem.hidden_size,
                  .out = out.data(),
                  .out_stride = wanted.out.stride},
                 stream());
  wait();
  ASSERT_EQ(out.download(), wanted.out.bytes);
}

TEST_F(DeviceCombine, NanInOneRow_StaysInItsToken) {
  const CombineProblem problem{.num_tokens = 40, .top_k = 4, .hidden_size = 520};
  CombineData data = make_data(problem, 1);
  std::fill(data.ids.begin(), data.ids.end(), 3);
  const Result clean = run(problem, data);
  data.experts.set(17 * 4 + 2, 519, kNan);
  data.weights[20 * 4] = kNan;
  const Result dirty = run(problem, data);
  const auto row_bytes = static_cast<size_t>(data.hidden.stride * 2);
  for (size_t token = 0; token < 40; ++token) {
    const auto begin = static_cast<std::ptrdiff_t>(token * row_bytes);
    const auto end = begin + static_cast<std::ptrdiff_t>(row_bytes);
    const bool same =
        std::equal(clean.out.begin() + begin, clean.out.begin() + end, dirty.out.begin() + begin);
    EXPECT_EQ(same, token != 17 && token != 20) << "token " << token;
  }
}

TEST_F(DeviceCombine, ExpertRowsThatAreMisaligned_AreATypedError) {
  EXPECT_THROW(device_combine({.expert_rows = nullptr,
                               .expert_row_stride = 7,
                               .num_tokens = 1,
                               .top_k = 1,
                               .hidden_size = 7},
                              stream()),
               Error);
}

}  // namespace
}  // namespace conclave::dispatch
