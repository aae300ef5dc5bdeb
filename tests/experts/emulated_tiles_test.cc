// Compares the row of tiles on emulated registers with the arithmetic that its manual states, bit
// for bit, and runs each row of the catalog once, so that one which cannot run here is named.
#include "experts/emulated_tiles.h"

#include "experts/catalog_cases.h"
#include "experts/expert_case.h"
#include "support/case_name.h"

#include <gtest/gtest-spi.h>

#include <bit>
#include <cmath>
#include <limits>

namespace conclave::testing {
namespace {

uint16_t bf16(double value) { return float_to_bf16(static_cast<float>(value)); }

TEST(TileProduct, EvenAndOddAreSummedBeforeTheyAreAdded) {
  const uint16_t row[] = {bf16(0x1p-12), bf16(0x1p-12)};
  // Added one after the other, each 2^-24 would be lost beside 1.
  EXPECT_EQ(tile_product(1.0F, row, row, 1), 1.0F + 0x1p-23F);
}

TEST(TileProduct, TiesRoundToEven) {
  const uint16_t row[] = {bf16(0x1p-12), 0};
  EXPECT_EQ(tile_product(1.0F, row, row, 1), 1.0F);
  EXPECT_EQ(tile_product(1.0F + 0x1p-23F, row, row, 1), 1.0F + 0x1p-22F);
}

TEST(TileProduct, SubnormalNumbersAreZeros) {
  const uint16_t subnormal[] = {0x0001, 0x8001};
  const uint16_t large[] = {bf16(0x1p100), bf16(0x1p100)};
  EXPECT_EQ(tile_product(0.0F, subnormal, large, 1), 0.0F) << "of the operands";
  const uint16_t small[] = {bf16(0x1p-70), 0};
  EXPECT_EQ(tile_product(0.0F, small, small, 1), 0.0F) << "of a product";
  const uint16_t zeros[] = {0, 0};
  EXPECT_EQ(tile_product(0x1p-130F, zeros, zeros, 1), 0.0F) << "of the sum";
}

TEST(ByteTileProduct, SignedTimesUnsigned_IsExactAndWrapsAround) {
  const int8_t row[] = {-128, 127, -1, 3};
  const uint8_t column[] = {255, 255, 128, 0};
  // A product of words would have saturated at -32768.
  EXPECT_EQ(byte_tile_product(7, row, column, 1), 7 - 128 * 255 + 127 * 255 - 128);
  const int8_t one[] = {1, 0, 0, 0};
  EXPECT_EQ(byte_tile_product(INT32_MAX, one, column, 1), INT32_MIN + 254);
}

TEST(EmulatedTiles, ProductsOfBytes_TakeFourKOfARowAndAColumn) {
  EmulatedTiles& tiles = EmulatedTiles::of_thread();
  alignas(64) uint8_t shape[64] = {1};
  // Sums of 3 x 5, over 8 k.
  const int sizes[][2] = {{3, 20}, {3, 8}, {2, 20}};
  for (int tile = 0; tile < 3; ++tile) {
    shape[16 + 2 * tile] = static_cast<uint8_t>(sizes[tile][1]);
    shape[48 + tile] = static_cast<uint8_t>(sizes[tile][0]);
  }
  tiles.configure(shape);
  int8_t rows[3][8];
  uint8_t weights[2][5][4];
  int32_t sums[3][5];
  for (int m = 0; m < 3; ++m) {
    for (int k = 0; k < 8; ++k) rows[m][k] = static_cast<int8_t>(37 * m - 19 * k);
    for (int n = 0; n < 5; ++n) sums[m][n] = 1000 * m + n;
  }
  for (int k = 0; k < 8; ++k) {
    for (int n = 0; n < 5; ++n) weights[k / 4][n][k % 4] = static_cast<uint8_t>(50 * n + 7 * k);
  }
  tiles.load(0, sums, sizeof(sums[0]));
  tiles.load(1, rows, sizeof(rows[0]));
  tiles.load(2, weights, sizeof(weights[0]));
  tiles.multiply_bytes(0, 1, 2);
  int32_t found[3][5];
  tiles.store(0, found, sizeof(found[0]));
  for (int m = 0; m < 3; ++m) {
    for (int n = 0; n < 5; ++n) {
      int32_t wanted = 1000 * m + n;
      for (int k = 0; k < 8; ++k) wanted += rows[m][k] * weights[k / 4][n][k % 4];
      EXPECT_EQ(found[m][n], wanted) << m << " " << n;
    }
  }
  tiles.release();
}

// Control: a fault on a CPU fails the test.
TEST(EmulatedTiles, MisusedRegisters_AreNoticed) {
  EmulatedTiles::of_thread().release();
  EXPECT_NONFATAL_FAILURE(EmulatedTiles::of_thread().zero(0), "not configured");
  static uint8_t sums[16 * 64];
  EXPECT_NONFATAL_FAILURE(EmulatedTiles::of_thread().store(8, sums, 64), "not configured");
  alignas(64) static uint8_t shape[64] = {1};
  for (int tile = 0; tile < 3; ++tile) {
    shape[16 + 2 * tile] = 64;
    shape[48 + tile] = static_cast<uint8_t>(tile == 0 ? 15 : 16);
  }
  EmulatedTiles::of_thread().configure(shape);
  EXPECT_NONFATAL_FAILURE(EmulatedTiles::of_thread().multiply_bf16(0, 1, 2), "rows of sums");
  EXPECT_NONFATAL_FAILURE(EmulatedTiles::of_thread().multiply_bytes(0, 1, 2), "rows of sums");
  shape[2] = 1;
  EXPECT_NONFATAL_FAILURE(EmulatedTiles::of_thread().configure(shape), "reserved byte 2");
  EmulatedTiles::of_thread().release();
}

// Returns x [k] times row `row` of a matrix [.., k], in steps of 32, each one a tile instruction.
float product_of_row(const std::vector<uint16_t>& x, const StoredMatrix& matrix, int64_t row) {
  const int64_t k = matrix.cols();
  float sum = 0;
  for (int64_t begin = 0; begin < k; begin += 32) {
    uint16_t values[32] = {};
    uint16_t weights[32] = {};
    for (int64_t i = begin; i < std::min(k, begin + 32); ++i) {
      values[i - begin] = x[static_cast<size_t>(i)];
      weights[i - begin] = bf16(matrix.at(row * k + i));
    }
    sum = tile_product(sum, values, weights, 16);
  }
  return sum;
}

std::vector<float> expected_row(ExpertCase& test_case, int64_t slot) {
  const CaseShape& shape = test_case.shape();
  const StoredExpert& stored = test_case.expert(test_case.expert_of_slot(slot));
  const activation::Activation formula = test_case.activation();
  const auto with_bias = [&](float sum, const StoredMatrix& bias, int64_t index) {
    return shape.has_bias ? sum + static_cast<float>(bias.at(index)) : sum;
  };
  std::vector<uint16_t> x(static_cast<size_t>(shape.hidden_size));
  const auto row = static_cast<size_t>(test_case.source_row()[static_cast<size_t>(slot)]);
  for (size_t i = 0; i < x.size(); ++i) x[i] = bf16(test_case.hidden()[row * x.size() + i]);
  std::vector<uint16_t> activated(static_cast<size_t>(shape.intermediate_size));
  for (int64_t i = 0; i < shape.intermediate_size; ++i) {
    const float up = with_bias(product_of_row(x, stored.up, i), stored.up_bias, i);
    const float gate =
        formula.gated ? with_bias(product_of_row(x, stored.gate, i), stored.gate_bias, i) : up;
    activated[static_cast<size_t>(i)] = float_to_bf16(activation::apply_scalar(formula, gate, up));
  }
  std::vector<float> out(static_cast<size_t>(shape.hidden_size));
  for (int64_t c = 0; c < shape.hidden_size; ++c) {
    out[static_cast<size_t>(c)] =
        with_bias(product_of_row(activated, stored.down, c), stored.down_bias, c);
  }
  return out;
}

void expect_same_bits(std::span<const float> actual, std::span<const float> expected,
                      const std::string& where) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(actual[i]), std::bit_cast<uint32_t>(expected[i]))
        << where << " column " << i << ": " << actual[i] << " and " << expected[i];
  }
}

void expect_stated_arithmetic(const CaseShape& shape) {
  ExpertCase test_case(shape);
  SerialExecutor executor(2);
  const auto problem = test_case.problem(cpu::best_isa(), cpu::Arithmetic::kAmxBf16);
  const auto out = test_case.run(*emulated_amx_row().make(problem), executor);
  const auto width = static_cast<size_t>(shape.hidden_size);
  for (int64_t slot = 0; slot < test_case.num_slots(); ++slot) {
    expect_same_bits(std::span(out).subspan(static_cast<size_t>(slot) * width, width),
                     expected_row(test_case, slot),
                     describe(shape) + " slot " + std::to_string(slot));
  }
}

TEST(EmulatedRow, RowCountsAroundTiles_StatedArithmetic) {
  for (const int64_t rows : {0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 96, 97}) {
    expect_stated_arithmetic(
        {.hidden_size = 65, .intermediate_size = 33, .rows_per_expert = {rows, 0, 1}});
  }
}

// One and two rows leave tiles alone.
TEST(EmulatedRow, FewRowsOfManyColumns_StatedArithmetic) {
  expect_stated_arithmetic(
      {.hidden_size = 1060, .intermediate_size = 530, .rows_per_expert = {1, 2, 0, 3}});
}

// Values that are subnormal, or make such sums, and values that are not finite.
TEST(EmulatedRow, ExtremeRows_StatedArithmetic) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const CaseShape shape{.hidden_size = 70, .intermediate_size = 40, .rows_per_expert = {1, 2, 5}};
  for (const bool extreme_weights : {false, true}) {
    ExpertCase test_case(shape);
    for (size_t row = 0; row < test_case.hidden().size() / 70; ++row) {
      float* const values = test_case.hidden().data() + row * 70;
      for (int i = 0; i < 70; ++i) {
        values[i] *= row % 4 == 0 ? 0x1p-126F : row % 4 == 1 ? 0x1p-133F : 1.0F;
      }
      if (row % 4 == 2) values[31] = -kInfinity;
      if (row % 4 == 3) values[69] = std::numeric_limits<float>::quiet_NaN();
    }
    if (extreme_weights) {
      for (StoredExpert& expert : test_case.experts()) {
        expert.up.set(5, 0x1p-130F);
        expert.gate.set(7 * 70 + 64, kInfinity);
        expert.down.set(3 * 40 + 2, 0x1p127F);
      }
    }
    SerialExecutor executor(2);
    std::vector<const experts::HostKernelRow*> rows = {&emulated_amx_row()};
    if (cpu::usable(cpu::Isa::kAmx)) {
      rows.push_back(&experts::host_kernels().find("cpu.amx", "kernel"));
    }
    for (const experts::HostKernelRow* row : rows) {
      const auto problem = test_case.problem(cpu::best_isa(), cpu::Arithmetic::kAmxBf16);
      const std::vector<float> out = test_case.run(*row->make(problem), executor);
      for (int64_t slot = 0; slot < test_case.num_slots(); ++slot) {
        const std::vector<float> expected = expected_row(test_case, slot);
        for (size_t c = 0; c < expected.size(); ++c) {
          const float actual = out[static_cast<size_t>(slot) * expected.size() + c];
          if (std::isnan(actual) && std::isnan(expected[c])) continue;
          ASSERT_EQ(std::bit_cast<uint32_t>(actual), std::bit_cast<uint32_t>(expected[c]))
              << row->name << " slot " << slot << " column " << c << ": " << actual << " and "
              << expected[c];
        }
      }
    }
  }
}

// Rows past the last real one would cost time without changing any result, so they are counted.
TEST(EmulatedRow, OnlyRowsThatExist_AreMultiplied) {
  for (const int64_t rows : {3, 16, 17, 33, 49, 63}) {
    const int64_t before = EmulatedTiles::of_thread().multiplied_rows();
    expect_stated_arithmetic(
        {.hidden_size = 32, .intermediate_size = 32, .rows_per_expert = {rows}});
    // One step of k, and four tiles of columns of either product.
    EXPECT_EQ(EmulatedTiles::of_thread().multiplied_rows() - before, 8 * rows) << rows;
  }
}

TEST(EmulatedRow, SizesAroundTiles_StatedArithmetic) {
  for (const int64_t size : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130}) {
    expect_stated_arithmetic(
        {.hidden_size = size, .intermediate_size = 40, .rows_per_expert = {1, 18}});
    expect_stated_arithmetic(
        {.hidden_size = 40, .intermediate_size = size, .rows_per_expert = {33}});
  }
}

TEST(EmulatedRow, EveryActivationWithBiases_StatedArithmetic) {
  for (const ActivationSpec& activation : all_activations()) {
    expect_stated_arithmetic({.hidden_size = 70,
                              .intermediate_size = 45,
                              .rows_per_expert = {17, 3, 0, 40},
                              .activation = activation,
                              .has_bias = true});
  }
}

// Tests the emulation itself, if there is hardware to compare it with.
TEST(EmulatedRow, OnACpuWithTiles_SameBitsAsTheirs) {
  if (const Support amx = cpu::usable(cpu::Isa::kAmx); !amx) {
    GTEST_SKIP() << "not run here: cpu.amx against its emulation (" << amx.reason() << ")";
  }
  const auto& row = experts::host_kernels().find("cpu.amx", "kernel");
  for (const bool has_bias : {false, true}) {
    for (const int64_t size : {1, 31, 33, 64, 130, 257}) {
      const CaseShape shape{.hidden_size = size,
                            .intermediate_size = 2 * size + 3,
                            .rows_per_expert = {1, 0, 15, 16, 17, 33, 100},
                            .has_bias = has_bias};
      const ExpertCase test_case(shape);
      const auto problem = test_case.problem(cpu::Isa::kAmx, cpu::Arithmetic::kAmxBf16);
      SerialExecutor executor(2);
      expect_same_bits(test_case.run(*row.make(problem), executor),
                       test_case.run(*emulated_amx_row().make(problem), executor), describe(shape));
    }
  }
}

class RowRunsHere : public ::testing::TestWithParam<size_t> {};

// A skipped case is listed by ctest, and scripts/test names the row.
TEST_P(RowRunsHere, WithinBound) {
  const auto catalog = experts::host_kernels();
  const experts::HostKernelRow& row = catalog.rows()[GetParam()];
  const CaseShape shape{.hidden_size = 65, .intermediate_size = 33, .rows_per_expert = {17, 0, 1}};
  const ExpertCase test_case(shape);
  const auto problem = test_case.problem(cpu::best_isa(), row);
  if (const Support here = row.supports(problem); !here) {
    GTEST_SKIP() << "not run here: " << row.name << " (" << here.reason() << ")";
  }
  SerialExecutor executor(2);
  const auto kernel = row.make(problem);
  const std::vector<float> out = test_case.run(*kernel, executor);
  for (int64_t slot = 0; slot < test_case.num_slots(); ++slot) {
    EXPECT_LE(relative_l2(out.data() + slot * shape.hidden_size, test_case.oracle(slot).data(),
                          shape.hidden_size),
              mlp_error(precision(shape, *kernel)));
  }
}

// Those of codes alone are run by coded_batch_test.cc.
std::vector<size_t> rows_of_values() {
  return catalog_places(
      [](cpu::Arithmetic arithmetic) { return !cpu::multiplies_integers(arithmetic); });
}

INSTANTIATE_TEST_SUITE_P(Catalog, RowRunsHere, ::testing::ValuesIn(rows_of_values()),
                         [](const auto& tested) {
                           const auto catalog = experts::host_kernels();
                           return case_name(std::string(catalog.rows()[tested.param].name));
                         });

}  // namespace
}  // namespace conclave::testing
