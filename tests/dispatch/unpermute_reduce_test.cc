#include "dispatch/unpermute_reduce.h"

#include "core/float_convert.h"
#include "support/executors.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

struct Problem {
  int64_t tokens = 0;
  int64_t terms = 0;
  int64_t hidden = 0;
  int64_t row_stride = 0;
  std::vector<float> rows = {};
  std::vector<int64_t> row_of = {};
  std::vector<float> weights = {};
  std::vector<float> shared = {};
};

Problem random_problem(int64_t tokens, int64_t terms, int64_t hidden, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Problem p{.tokens = tokens, .terms = terms, .hidden = hidden, .row_stride = hidden + 5};
  const int64_t num_rows = tokens * terms + 1;
  p.rows.resize(static_cast<size_t>(num_rows * p.row_stride));
  for (float& value : p.rows) value = normal(generator);
  std::uniform_int_distribution<int64_t> row(-1, num_rows - 1);
  for (int64_t i = 0; i < tokens * terms; ++i) {
    p.row_of.push_back(row(generator));
    p.weights.push_back(normal(generator));
  }
  p.shared.resize(static_cast<size_t>(tokens * hidden));
  for (float& value : p.shared) value = normal(generator);
  return p;
}

std::vector<float> expected(const Problem& p, bool with_shared) {
  std::vector<float> out;
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t c = 0; c < p.hidden; ++c) {
      float sum = 0.0F;
      for (int64_t j = 0; j < p.terms; ++j) {
        const auto at = static_cast<size_t>(t * p.terms + j);
        if (p.row_of[at] < 0) continue;
        const float product =
            p.weights[at] * p.rows[static_cast<size_t>(p.row_of[at] * p.row_stride + c)];
        sum += product;
      }
      if (with_shared) sum += p.shared[static_cast<size_t>(t * p.hidden + c)];
      out.push_back(sum);
    }
  }
  return out;
}

dispatch::UnpermuteArgs args_of(const Problem& p, void* out, DType dtype, int64_t out_stride) {
  return {.rows = p.rows.data(),
          .row_stride = p.row_stride,
          .row_of = p.row_of.data(),
          .weights = p.weights.data(),
          .num_tokens = p.tokens,
          .terms = p.terms,
          .out = {out, dtype, Shape{p.tokens, p.hidden}, out_stride}};
}

TEST(UnpermuteReduce, AnyShape_EqualsTheScalarSumBitForBit) {
  testing::SerialExecutor serial;
  uint32_t seed = 1;
  for (const int64_t tokens : {0, 1, 3, 40}) {
    for (const int64_t terms : {1, 2, 8, 40}) {
      for (const int64_t hidden : {1, 31, 32, 33, 64, 511, 2048}) {
        SCOPED_TRACE("tokens " + std::to_string(tokens) + ", terms " + std::to_string(terms) +
                     ", hidden " + std::to_string(hidden));
        const Problem p = random_problem(tokens, terms, hidden, seed++);
        std::vector<float> out(static_cast<size_t>(tokens * hidden), -1.0F);
        dispatch::unpermute_reduce(args_of(p, out.data(), DType::kF32, 0), serial);
        ASSERT_EQ(out, expected(p, false));
        dispatch::UnpermuteArgs with_shared = args_of(p, out.data(), DType::kF32, 0);
        with_shared.finish.shared = p.shared.data();
        with_shared.finish.shared_stride = hidden;
        dispatch::unpermute_reduce(with_shared, serial);
        ASSERT_EQ(out, expected(p, true));
      }
    }
  }
}

TEST(UnpermuteReduce, SixteenBitOutput_IsRoundedOnceFromTheFloatSum) {
  testing::SerialExecutor serial;
  const Problem p = random_problem(20, 8, 100, 7);
  const std::vector<float> sums = expected(p, false);
  std::vector<uint16_t> f16(sums.size());
  std::vector<uint16_t> bf16(sums.size());
  dispatch::unpermute_reduce(args_of(p, f16.data(), DType::kF16, 0), serial);
  dispatch::unpermute_reduce(args_of(p, bf16.data(), DType::kBF16, 0), serial);
  for (size_t i = 0; i < sums.size(); ++i) {
    ASSERT_EQ(f16[i], float_to_f16(sums[i]));
    ASSERT_EQ(bf16[i], float_to_bf16(sums[i]));
  }
}

TEST(UnpermuteReduce, StridedOutput_LeavesTheGapsAlone) {
  testing::SerialExecutor serial;
  const Problem p = random_problem(5, 2, 40, 9);
  const std::vector<float> sums = expected(p, false);
  std::vector<float> out(5 * 50, 99.0F);
  dispatch::unpermute_reduce(args_of(p, out.data(), DType::kF32, 50), serial);
  for (size_t t = 0; t < 5; ++t) {
    for (size_t c = 0; c < 50; ++c) {
      EXPECT_EQ(out[t * 50 + c], c < 40 ? sums[t * 40 + c] : 99.0F);
    }
  }
}

TEST(UnpermuteReduce, Threads_DoNotChangeABit) {
  const Problem p = random_problem(300, 8, 700, 11);
  const std::vector<float> sums = expected(p, false);
  for (const int32_t workers : {1, 2, 3, 8}) {
    testing::ThreadExecutor threads(workers);
    std::vector<float> out(sums.size());
    dispatch::unpermute_reduce(args_of(p, out.data(), DType::kF32, 0), threads);
    EXPECT_EQ(out, sums) << workers << " workers";
  }
}

TEST(UnpermuteReduce, AnotherOrderOfTerms_ChangesBits) {
  // The negative control for the test above: order matters here, so equality there is meaningful.
  Problem p = random_problem(300, 8, 100, 13);
  const std::vector<float> sums = expected(p, false);
  for (size_t t = 0; t < 300; ++t) {
    std::reverse(p.row_of.begin() + static_cast<int>(t * 8),
                 p.row_of.begin() + static_cast<int>(t * 8 + 8));
    std::reverse(p.weights.begin() + static_cast<int>(t * 8),
                 p.weights.begin() + static_cast<int>(t * 8 + 8));
  }
  testing::SerialExecutor serial;
  std::vector<float> out(sums.size());
  dispatch::unpermute_reduce(args_of(p, out.data(), DType::kF32, 0), serial);
  EXPECT_NE(out, sums);
}

TEST(UnpermuteReduce, NonFiniteRowOrWeight_MakesOnlyItsTokensNonFinite) {
  testing::SerialExecutor serial;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Problem p = random_problem(6, 2, 40, 15);
  for (size_t i = 0; i < p.row_of.size(); ++i) p.row_of[i] = static_cast<int64_t>(i);
  std::vector<float> clean(6 * 40);
  dispatch::unpermute_reduce(args_of(p, clean.data(), DType::kF32, 0), serial);
  p.weights[2 * 2] = nan;                                         // token 2
  p.rows[static_cast<size_t>((4 * 2 + 1) * p.row_stride)] = nan;  // token 4, column 0
  std::vector<float> out(clean.size());
  dispatch::unpermute_reduce(args_of(p, out.data(), DType::kF32, 0), serial);
  for (size_t t = 0; t < 6; ++t) {
    for (size_t c = 0; c < 40; ++c) {
      const size_t at = t * 40 + c;
      if (t == 2 || (t == 4 && c == 0)) {
        EXPECT_TRUE(std::isnan(out[at])) << t << ", " << c;
      } else {
        EXPECT_EQ(out[at], clean[at]) << t << ", " << c;
      }
    }
  }
}

TEST(UnpermuteReduce, SkippedTokens_GetZeroPlusShared) {
  testing::SerialExecutor serial;
  Problem p = random_problem(2, 3, 33, 17);
  std::fill(p.row_of.begin(), p.row_of.end(), -1);
  std::fill(p.weights.begin(), p.weights.end(), std::numeric_limits<float>::quiet_NaN());
  std::vector<float> out(2 * 33, 5.0F);
  dispatch::unpermute_reduce(args_of(p, out.data(), DType::kF32, 0), serial);
  EXPECT_EQ(out, std::vector<float>(2 * 33, 0.0F));
  dispatch::UnpermuteArgs with_shared = args_of(p, out.data(), DType::kF32, 0);
  with_shared.finish.shared = p.shared.data();
  with_shared.finish.shared_stride = 33;
  dispatch::unpermute_reduce(with_shared, serial);
  EXPECT_EQ(out, p.shared);
}

TEST(UnpermuteReduce, EveryTermOfFinish_EqualsItsFormulaBitForBit) {
  testing::SerialExecutor serial;
  constexpr int64_t kTokens = 5;
  constexpr int64_t kHidden = 45;
  const Problem p = random_problem(kTokens, 3, kHidden, 23);
  const Problem other = random_problem(kTokens, 3, kHidden, 29);
  const std::vector<float> sums = expected(p, false);
  const std::vector<float> identity_weights = {0.5F, 0.0F, -1.25F, 2.0F, 0.75F};
  const std::vector<float> mix = {0.5F, 0.25F, 1.5F, 1.0F, 3.0F};
  const std::vector<uint8_t> active = {1, 1, 1, 0, 1};
  // The sum is in place: the identity rows are the output's own.
  std::vector<float> out(other.rows.begin(), other.rows.begin() + kTokens * kHidden);
  out[kHidden] = std::numeric_limits<float>::quiet_NaN();  // has weight 0
  const std::vector<float> identity = out;
  dispatch::UnpermuteArgs args = args_of(p, out.data(), DType::kF32, 0);
  args.finish = {.scale = 1.5F,
                 .identity_weights = identity_weights.data(),
                 .identity = {out.data(), DType::kF32, Shape{kTokens, kHidden}, 0},
                 .bias = other.shared.data(),
                 .mix = mix.data(),
                 .shared = p.shared.data(),
                 .shared_stride = kHidden,
                 .residual = other.shared.data(),
                 .residual_stride = kHidden,
                 .active = active.data()};
  dispatch::unpermute_reduce(args, serial);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t c = 0; c < kHidden; ++c) {
      const auto token = static_cast<size_t>(t);
      const auto at = static_cast<size_t>(t * kHidden + c);
      float value = sums[at] * 1.5F;
      if (identity_weights[token] != 0.0F) value += identity_weights[token] * identity[at];
      value += other.shared[static_cast<size_t>(c)];
      value *= mix[token];
      value += p.shared[at];
      value += other.shared[at];
      EXPECT_EQ(out[at], active[token] != 0 ? value : 0.0F) << t << ", " << c;
    }
  }
}

TEST(UnpermuteReduce, RowsOfZeroExperts_AreReadByTypeAndStride) {
  testing::SerialExecutor serial;
  constexpr int64_t kTokens = 5;
  constexpr int64_t kHidden = 45;
  const Problem p = random_problem(kTokens, 3, kHidden, 37);
  const std::vector<float> sums = expected(p, false);
  const std::vector<float> weights = {0.5F, 0.25F, -1.25F, 2.0F, 0.75F};
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t stride : {int64_t{0}, kHidden, p.row_stride}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + ", stride " + std::to_string(stride));
      Tensor rows(dtype, {kTokens * p.row_stride});
      const Shape all = rows.shape();
      convert({p.rows.data(), DType::kF32, all}, rows.view());
      std::vector<float> read(static_cast<size_t>(kTokens * p.row_stride));
      convert(rows.const_view(), {read.data(), DType::kF32, all});
      std::vector<float> out(sums.size());
      dispatch::UnpermuteArgs args = args_of(p, out.data(), DType::kF32, 0);
      args.finish.identity_weights = weights.data();
      args.finish.identity = {rows.as<std::byte>(), dtype, Shape{kTokens, kHidden}, stride};
      dispatch::unpermute_reduce(args, serial);
      const int64_t apart = stride != 0 ? stride : kHidden;
      for (int64_t t = 0; t < kTokens; ++t) {
        for (int64_t c = 0; c < kHidden; ++c) {
          const float added =
              weights[static_cast<size_t>(t)] * read[static_cast<size_t>(t * apart + c)];
          const auto at = static_cast<size_t>(t * kHidden + c);
          EXPECT_EQ(out[at], sums[at] + added) << t << ", " << c;
        }
      }
    }
  }
}

TEST(UnpermuteReduce, NoRowMapAndNoWeights_CopyRows) {
  testing::SerialExecutor serial;
  const Problem p = random_problem(4, 1, 50, 19);
  std::vector<float> out(4 * 50);
  dispatch::UnpermuteArgs args = args_of(p, out.data(), DType::kF32, 0);
  args.row_of = nullptr;
  args.weights = nullptr;
  dispatch::unpermute_reduce(args, serial);
  for (size_t t = 0; t < 4; ++t) {
    for (size_t c = 0; c < 50; ++c) EXPECT_EQ(out[t * 50 + c], p.rows[t * 55 + c]);
  }
}

TEST(UnpermuteReduce, WrongOutput_IsRefused) {
  testing::SerialExecutor serial;
  const Problem p = random_problem(2, 1, 8, 21);
  std::vector<double> out(16);
  const auto code_of = [&](const dispatch::UnpermuteArgs& args) {
    try {
      dispatch::unpermute_reduce(args, serial);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  EXPECT_EQ(code_of(args_of(p, out.data(), DType::kF64, 0)), ErrorCode::kDType);
  dispatch::UnpermuteArgs args = args_of(p, out.data(), DType::kF32, 0);
  args.out.shape = Shape{3, 8};
  EXPECT_EQ(code_of(args), ErrorCode::kShape);
}

}  // namespace
}  // namespace conclave
