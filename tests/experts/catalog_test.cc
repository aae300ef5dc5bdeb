#include "experts/catalog.h"

#include "experts/kernel.h"
#include "support/activations.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave::testing {
namespace {

experts::ExpertsProblem problem(DType weights, cpu::Isa isa, cpu::Arithmetic arithmetic) {
  return {.num_local_experts = 2,
          .hidden_size = 64,
          .intermediate_size = 32,
          .weight_dtype = weights,
          .target = experts::CpuTarget{.isa = isa, .arithmetic = arithmetic}};
}

std::string_view chosen(const experts::ExpertsProblem& asked) {
  static const auto catalog = experts::kernel_catalog(DeviceKind::kCpu);
  for (const auto& row : catalog.rows()) {
    if (row.supports(asked)) return row.name;
  }
  return "none";
}

TEST(KernelCatalog, EachIsaAndArithmetic_PicksItsRow) {
  using cpu::Arithmetic;
  using cpu::Isa;
  const DType bf16 = DType::kBF16;
  EXPECT_EQ(chosen(problem(bf16, Isa::kAmx, Arithmetic::kAmxBf16)), "cpu.amx");
  EXPECT_EQ(chosen(problem(bf16, Isa::kAmx, Arithmetic::kDpBf16)), "cpu.avx512_bf16");
  EXPECT_EQ(chosen(problem(bf16, Isa::kAvx512Bf16, Arithmetic::kF32Fma)), "cpu.avx512");
  EXPECT_EQ(chosen(problem(bf16, Isa::kAvx2, Arithmetic::kF32Fma)), "cpu.avx2");
  EXPECT_EQ(chosen(problem(bf16, Isa::kScalar, Arithmetic::kF32Fma)), "cpu.reference");
  // No row has the arithmetic for that instruction set, but the reference still runs it.
  EXPECT_EQ(chosen(problem(bf16, Isa::kAvx512, Arithmetic::kDpBf16)), "cpu.reference");
}

TEST(KernelCatalog, WideWeights_IgnoreTheBf16Arithmetic) {
  for (const DType weights : {DType::kF32, DType::kF16}) {
    EXPECT_EQ(chosen(problem(weights, cpu::Isa::kAmx, cpu::Arithmetic::kAmxBf16)), "cpu.avx512");
    EXPECT_EQ(chosen(problem(weights, cpu::Isa::kAvx2, cpu::Arithmetic::kDpBf16)), "cpu.avx2");
  }
}

TEST(KernelCatalog, EveryRefusal_SaysWhy) {
  const auto asked = problem(DType::kF32, cpu::Isa::kScalar, cpu::Arithmetic::kF32Fma);
  const auto catalog = experts::kernel_catalog(DeviceKind::kCpu);
  for (const auto& row : catalog.rows()) {
    const Support support = row.supports(asked);
    EXPECT_NE(static_cast<bool>(support), !support.reason().empty()) << row.name;
  }
  EXPECT_EQ(catalog.rows().back().name, "cpu.reference");
}

TEST(KernelCatalog, EveryRow_TakesEveryActivationAndBiases) {
  for (const auto& row : experts::kernel_catalog(DeviceKind::kCpu).rows()) {
    for (const ActivationSpec& activation : all_activations()) {
      auto asked = problem(DType::kBF16, cpu::Isa::kAmx, cpu::parse_arithmetic(row.arithmetic));
      asked.activation = activation::parse_activation(activation);
      asked.has_bias = true;
      asked.intermediate_size = 0;
      const Support support = row.supports(asked);
      EXPECT_TRUE(support) << row.name << " " << activation.name << ": " << support.reason();
    }
  }
}

TEST(KernelCatalog, IntegerWeights_NoRow) {
  EXPECT_EQ(chosen(problem(DType::kI8, cpu::Isa::kAmx, cpu::Arithmetic::kF32Fma)), "none");
}

TEST(KernelCatalog, AllRowsOfAType_ShareOnePackedLayout) {
  for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto catalog = experts::kernel_catalog(DeviceKind::kCpu);
    std::string layout;
    for (const auto& row : catalog.rows()) {
      const auto asked = problem(weights, cpu::Isa::kAmx, cpu::parse_arithmetic(row.arithmetic));
      if (!row.supports(asked)) continue;
      const auto kernel = row.make(asked);
      if (layout.empty()) layout = kernel->packed_layout();
      EXPECT_EQ(kernel->packed_layout(), layout) << row.name;
      EXPECT_EQ(kernel->requirements().row_bytes % 64, 0) << row.name;
      EXPECT_EQ(kernel->slab_bytes().gate_up % 64, 0U) << row.name;
      EXPECT_EQ(kernel->slab_bytes().down % 64, 0U) << row.name;
    }
  }
}

}  // namespace
}  // namespace conclave::testing
