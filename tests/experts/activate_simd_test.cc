// Compares the epilogues of every instruction set with the scalar formulas, bit for bit.
#include "core/float_convert.h"
#include "cpu/isa.h"
#include "experts/cpu/mlp_functions.h"
#include "support/activations.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using activation::Activation;

constexpr int64_t kRows = 1024;

// [kRows, 64] sums of all kinds: any bit pattern, usual magnitudes, and special values.
std::vector<float> make_sums(uint64_t seed) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kSpecial[] = {0.0F,  -0.0F,  0x1p-149F, -0x1p-126F, 1.0F,    -1.0F,  7.0F,
                                -7.0F, 15.0F,  -15.0F,    110.0F,     -110.0F, 130.0F, -130.0F,
                                3e38F, -3e38F, kInf,      -kInf,      NAN};
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0F, 5.0F);
  std::vector<float> sums(static_cast<size_t>(kRows * 64));
  for (float& value : sums) {
    switch (random() % 4) {
      case 0:
        value = std::bit_cast<float>(static_cast<uint32_t>(random()));
        break;
      case 1:
        value = kSpecial[random() % std::size(kSpecial)];
        break;
      default:
        value = normal(random);
        break;
    }
  }
  return sums;
}

struct Epilogue {
  std::string name;
  gemm::EpilogueFunction run;
  DType rows;
};

std::vector<Epilogue> epilogues(const Activation& formula) {
  std::vector<Epilogue> all;
  const cpu::Isa best = cpu::best_isa();
  if (best >= cpu::Isa::kAvx2) {
    const auto functions = experts::mlp_functions_avx2(DType::kF32, formula);
    all.push_back({"avx2", functions.activate, DType::kF32});
  }
  if (best >= cpu::Isa::kAvx512) {
    const auto functions = experts::mlp_functions_avx512(DType::kF32, formula);
    all.push_back({"avx512", functions.activate, DType::kF32});
  }
  if (best >= cpu::Isa::kAvx512Bf16) {
    const auto functions = experts::mlp_functions_avx512_bf16(DType::kBF16, formula, DType::kBF16);
    all.push_back({"avx512_bf16", functions.activate, DType::kBF16});
  }
  if (best >= cpu::Isa::kAmx) {
    const auto functions = experts::mlp_functions_amx(DType::kBF16, formula, DType::kBF16);
    all.push_back({"amx", functions.activate, DType::kBF16});
  }
  return all;
}

bool same(float actual, float expected) {
  return (std::isnan(actual) && std::isnan(expected)) ||
         std::bit_cast<uint32_t>(actual) == std::bit_cast<uint32_t>(expected);
}

float read(const std::vector<std::byte>& out, DType rows, int64_t index) {
  if (rows == DType::kF32) {
    float value;
    std::memcpy(&value, out.data() + index * 4, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, out.data() + index * 2, sizeof(bits));
  return bf16_to_float(bits);
}

// Each row has `columns` outputs, of which `valid` exist.
void expect_equal(const Epilogue& epilogue, const Activation& formula, std::vector<float>& sums,
                  int64_t valid) {
  const int64_t columns = formula.gated ? 32 : 64;
  const int64_t element = byte_size(epilogue.rows);
  const auto parameters = activation::formula_parameters(formula);
  std::vector<std::byte> out(static_cast<size_t>(kRows * columns * element), std::byte{0xff});
  epilogue.run({.valid_columns = valid, .epilogue_parameters = &parameters},
               {.sums = sums.data(),
                .num_rows = kRows,
                .out = out.data(),
                .out_row_bytes = columns * element,
                .out_block_bytes = 32 * element});
  for (int64_t i = 0; i < kRows * columns; ++i) {
    const int64_t column = i % columns;
    const float* row = sums.data() + i / columns * 64;
    const float gate = row[column];
    const float up = row[column + 64 - columns];
    float expected = column < valid ? activation::apply_scalar(formula, gate, up) : 0.0F;
    if (epilogue.rows == DType::kBF16) expected = bf16_to_float(float_to_bf16(expected));
    const float actual = read(out, epilogue.rows, i);
    ASSERT_TRUE(same(actual, expected))
        << epilogue.name << " " << activation::to_string(formula.id) << " gate " << gate << " up "
        << up << ": " << actual << ", expected " << expected;
  }
}

TEST(Epilogues, EveryFormulaOnEveryInstructionSet_EqualsTheScalarOne) {
  for (const ActivationSpec& spec : all_activations()) {
    const Activation formula = activation::parse_activation(spec);
    std::vector<float> sums = make_sums(17);
    for (const Epilogue& epilogue : epilogues(formula)) {
      for (const int64_t valid : {1, 8, 19, 32, 64}) {
        if (valid > 32 && formula.gated) continue;
        expect_equal(epilogue, formula, sums, valid);
      }
    }
  }
}

}  // namespace
}  // namespace conclave::testing
