#include "gemm/gate_product.h"

#include "core/float_convert.h"
#include "cpu/memory.h"
#include "support/executors.h"
#include "support/guarded.h"
#include "support/tolerance.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace conclave::testing {
namespace {

constexpr cpu::Isa kIsas[] = {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512};

struct Problem {
  int64_t tokens;
  int64_t columns;
  int64_t k;
  std::vector<float> weights;  // [columns, k], exact in bf16
  std::vector<float> rows;     // [tokens, k]
  int64_t gap = 0;             // elements between stored rows of weights

  Problem(int64_t t, int64_t n, int64_t k_size) : tokens(t), columns(n), k(k_size) {
    std::mt19937_64 random(11);
    std::normal_distribution<float> normal(0.0F, 1.0F / std::sqrt(static_cast<float>(k)));
    for (int64_t i = 0; i < columns * k; ++i) {
      weights.push_back(bf16_to_float(float_to_bf16(normal(random))));
    }
    std::normal_distribution<float> unit(0.0F, 1.0F);
    for (int64_t i = 0; i < tokens * k; ++i) rows.push_back(unit(random));
  }

  std::vector<std::byte> stored(DType dtype) const {
    const int64_t elements = columns * (k + gap);
    std::vector<std::byte> bytes(static_cast<size_t>(elements * byte_size(dtype)), std::byte{0x3f});
    convert({weights.data(), DType::kF32, Shape{columns, k}, 0},
            {bytes.data(), dtype, Shape{columns, k}, k + gap});
    return bytes;
  }

  std::vector<float> run(DType dtype, cpu::Isa isa, DType round_to, Executor& executor,
                         GuardSide side = GuardSide::kEnd) const {
    const std::vector<std::byte> bytes = stored(dtype);
    const auto product = gemm::make_dense_product({bytes.data(), dtype, Shape{columns, k}, k + gap},
                                                  isa, cpu::default_allocator());
    const int64_t row_bytes = product->row_bytes();
    const GuardedBuffer padded(static_cast<size_t>(tokens * row_bytes), side, 0);
    for (int64_t t = 0; t < tokens; ++t) {
      std::memcpy(padded.data() + t * row_bytes, rows.data() + t * k,
                  static_cast<size_t>(k) * sizeof(float));
    }
    const GuardedBuffer out(static_cast<size_t>(tokens * columns) * sizeof(float), side, 0xff);
    product->run({padded.data(), tokens, row_bytes, DType::kF32}, out.as<float>(), round_to,
                 executor);
    return {out.as<float>(), out.as<float>() + tokens * columns};
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(DenseProduct, EveryIsaAndType_EqualBitsWithinBound) {
  SerialExecutor executor(2);
  for (const int64_t columns : {1, 8, 60, 64, 65, 130}) {
    for (const int64_t k : {1, 7, 32, 65, 200}) {
      const Problem problem(7, columns, k);
      std::vector<float> first;
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const cpu::Isa isa : kIsas) {
          if (!cpu::usable(isa)) continue;
          // The weights are exact in f32 and bf16; f16 may lose the smallest ones.
          const std::vector<float> out = problem.run(dtype, isa, DType::kF32, executor);
          if (dtype == DType::kF16) {
            EXPECT_TRUE(
                same_bits(out, problem.run(dtype, cpu::Isa::kScalar, DType::kF32, executor)));
            continue;
          }
          if (first.empty()) first = out;
          EXPECT_TRUE(same_bits(out, first))
              << to_string(dtype) << " " << cpu::to_string(isa) << " N=" << columns << " K=" << k;
        }
      }
      std::vector<double> exact(first.size(), 0.0);
      for (int64_t t = 0; t < problem.tokens; ++t) {
        for (int64_t c = 0; c < columns; ++c) {
          for (int64_t i = 0; i < k; ++i) {
            exact[static_cast<size_t>(t * columns + c)] +=
                double(problem.rows[static_cast<size_t>(t * k + i)]) *
                double(problem.weights[static_cast<size_t>(c * k + i)]);
          }
        }
      }
      EXPECT_LE(relative_l2(first.data(), exact.data(), static_cast<int64_t>(exact.size())),
                product_error(k, DType::kF32));
    }
  }
}

TEST(DenseProduct, AnyBatchAndThreads_SameBits) {
  const Problem problem(200, 70, 96);
  SerialExecutor one;
  ThreadExecutor many(4);
  const std::vector<float> all =
      problem.run(DType::kBF16, cpu::best_isa(), DType::kF32, many, GuardSide::kBegin);
  for (const int64_t token : {0, 5, 47, 48, 95, 199}) {
    Problem alone = problem;
    alone.tokens = 1;
    alone.rows.assign(problem.rows.begin() + token * problem.k,
                      problem.rows.begin() + (token + 1) * problem.k);
    const std::vector<float> row = alone.run(DType::kBF16, cpu::best_isa(), DType::kF32, one);
    EXPECT_EQ(
        std::memcmp(row.data(), all.data() + token * problem.columns, row.size() * sizeof(float)),
        0)
        << "token " << token;
  }
}

TEST(DenseProduct, RoundTo_RoundsEachLogit) {
  const Problem problem(5, 20, 40);
  SerialExecutor executor;
  const auto exact = problem.run(DType::kF32, cpu::best_isa(), DType::kF32, executor);
  const auto bf16 = problem.run(DType::kF32, cpu::best_isa(), DType::kBF16, executor);
  const auto f16 = problem.run(DType::kF32, cpu::best_isa(), DType::kF16, executor);
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_EQ(bf16[i], bf16_to_float(float_to_bf16(exact[i])));
    EXPECT_EQ(f16[i], f16_to_float(float_to_f16(exact[i])));
  }
}

TEST(DenseProduct, RowsOfWeightsThatLieApart_AreThoseOfDenseOnes) {
  const Problem dense(3, 65, 33);
  Problem apart = dense;
  apart.gap = 7;
  SerialExecutor executor;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    EXPECT_TRUE(same_bits(apart.run(dtype, cpu::best_isa(), DType::kF32, executor),
                          dense.run(dtype, cpu::best_isa(), DType::kF32, executor)));
  }
}

TEST(DenseProduct, NoTokens_WritesNothing) {
  const Problem problem(0, 20, 40);
  SerialExecutor executor(2);
  EXPECT_TRUE(problem.run(DType::kBF16, cpu::best_isa(), DType::kF32, executor).empty());
}

TEST(DenseProduct, IntegerWeights_AreRefused) {
  const int32_t weights[4] = {};
  try {
    gemm::make_dense_product({weights, DType::kI32, Shape{2, 2}, 0}, cpu::Isa::kScalar,
                             cpu::default_allocator());
    FAIL() << "accepted integer weights";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDType);
    EXPECT_EQ(error.detail().found, "I32");
  }
}

TEST(DenseProduct, VectorOfWeights_IsRefused) {
  const float weights[4] = {};
  EXPECT_THROW(gemm::make_dense_product({weights, DType::kF32, Shape{4}, 0}, cpu::Isa::kScalar,
                                        cpu::default_allocator()),
               Error);
}

}  // namespace
}  // namespace conclave::testing
