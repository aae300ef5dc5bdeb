#include "experts/catalog.h"

#include "experts/kernel.h"
#include "experts/ladder.h"
#include "support/activations.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
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
  static const auto catalog = experts::host_kernels();
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

TEST(KernelCatalog, Codes_TakeTheBf16ArithmeticBesideRowsThatItHasExactly) {
  auto asked = problem(DType::kI8, cpu::Isa::kAvx512Bf16, cpu::Arithmetic::kDpBf16);
  asked.quant = {.weights = WeightScale::kChannel};
  EXPECT_EQ(chosen(asked), "cpu.avx512_bf16");
  asked.quant.activations = ActivationScale::kToken;
  EXPECT_EQ(chosen(asked), "cpu.avx512");
  asked.weight_dtype = DType::kF8E4M3;
  EXPECT_EQ(chosen(asked), "cpu.avx512_bf16") << "codes of rows are exact in bf16";
  asked.quant = {.weights = WeightScale::kBlock,
                 .block_rows = 1,
                 .block_cols = 16,
                 .activations = ActivationScale::kToken};
  EXPECT_EQ(chosen(asked), "cpu.avx512_bf16");
  asked.target = experts::CpuTarget{.isa = cpu::Isa::kAmx, .arithmetic = cpu::Arithmetic::kAmxBf16};
  EXPECT_EQ(chosen(asked), "cpu.avx512") << "half of each tile would be zeros";
  asked.quant.block_cols = 32;
  EXPECT_EQ(chosen(asked), "cpu.amx");
  asked.quant.activations = ActivationScale::kGroup;
  asked.quant.activation_group = 16;
  EXPECT_EQ(chosen(asked), "cpu.avx512");
  asked.target =
      experts::CpuTarget{.isa = cpu::Isa::kAvx512Bf16, .arithmetic = cpu::Arithmetic::kDpBf16};
  asked.weight_dtype = DType::kI8;
  asked.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 5};
  EXPECT_EQ(chosen(asked), "cpu.avx512");
  asked.quant.block_cols = 32;
  EXPECT_EQ(chosen(asked), "cpu.avx512_bf16");
  asked.quant.zeros = WeightZero::kPoint;
  EXPECT_EQ(chosen(asked), "cpu.avx512_bf16");
  asked.quant.has_column_order = true;
  EXPECT_EQ(chosen(asked), "cpu.avx512");
  asked.quant.has_column_order = false;
  asked.target = experts::CpuTarget{.isa = cpu::Isa::kAvx512Bf16,
                                    .arithmetic = cpu::Arithmetic::kDpBf16,
                                    .permutes_bytes = false};
  EXPECT_EQ(chosen(asked), "cpu.avx512");
  asked.target = experts::CpuTarget{.isa = cpu::Isa::kAmx, .arithmetic = cpu::Arithmetic::kAmxBf16};
  EXPECT_EQ(chosen(asked), "cpu.amx");
  asked.target = experts::CpuTarget{.isa = cpu::Isa::kAvx512Bf16};
  EXPECT_EQ(chosen(asked), "cpu.avx512");
}

TEST(KernelCatalog, WholeNumbers_TakeDotProductsOfBytes) {
  auto asked = problem(DType::kI8, cpu::Isa::kAvx512Vnni, cpu::Arithmetic::kInt8Dot);
  asked.quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
  EXPECT_EQ(chosen(asked), "cpu.avx512_vnni");
  asked.weight_dtype = DType::kI4;
  EXPECT_EQ(chosen(asked), "cpu.avx512_vnni");
  asked.target =
      experts::CpuTarget{.isa = cpu::Isa::kAvx512, .arithmetic = cpu::Arithmetic::kInt8Dot};
  EXPECT_EQ(chosen(asked), "cpu.avx512") << "the same bits";
  asked.target = experts::CpuTarget{.isa = cpu::Isa::kAmx, .arithmetic = cpu::Arithmetic::kInt8Dot};
  EXPECT_EQ(chosen(asked), "cpu.amx_int8");
  asked.target =
      experts::CpuTarget{.isa = cpu::Isa::kAvx2, .arithmetic = cpu::Arithmetic::kInt8Dot};
  EXPECT_EQ(chosen(asked), "cpu.avx2_int8");
  asked.target = experts::CpuTarget{
      .isa = cpu::Isa::kAvx2, .arithmetic = cpu::Arithmetic::kInt8Dot, .has_avx_vnni = true};
  EXPECT_EQ(chosen(asked), "cpu.avx_vnni");
  asked.target = experts::CpuTarget{
      .isa = cpu::Isa::kScalar, .arithmetic = cpu::Arithmetic::kInt8Dot, .has_avx_vnni = true};
  EXPECT_EQ(chosen(asked), "cpu.reference");
  asked = problem(DType::kF8E4M3, cpu::Isa::kAmx, cpu::Arithmetic::kInt8Dot);
  asked.quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
  EXPECT_EQ(chosen(asked), "cpu.avx512") << "no whole numbers";
  asked = problem(DType::kI8, cpu::Isa::kAmx, cpu::Arithmetic::kInt8Dot);
  asked.quant = {.weights = WeightScale::kChannel};
  EXPECT_EQ(chosen(asked), "cpu.avx512") << "rows are no codes";
  asked = problem(DType::kBF16, cpu::Isa::kAmx, cpu::Arithmetic::kInt8Dot);
  EXPECT_EQ(chosen(asked), "cpu.reference");
  asked.is_beside_quantised_rows = true;
  EXPECT_EQ(chosen(asked), "cpu.amx_int8");
}

TEST(KernelCatalog, EveryRefusal_SaysWhy) {
  const auto asked = problem(DType::kF32, cpu::Isa::kScalar, cpu::Arithmetic::kF32Fma);
  const auto catalog = experts::host_kernels();
  for (const auto& row : catalog.rows()) {
    const Support support = row.supports(asked);
    EXPECT_NE(static_cast<bool>(support), !support.reason().empty()) << row.name;
  }
  EXPECT_EQ(catalog.rows().back().name, "cpu.reference");
}

TEST(KernelCatalog, EveryRow_TakesEveryActivationAndBiases) {
  for (const auto& row : experts::host_kernels().rows()) {
    for (const ActivationSpec& activation : all_activations()) {
      const auto arithmetic = cpu::parse_arithmetic(row.arithmetic);
      auto asked = problem(DType::kBF16, cpu::Isa::kAmx, arithmetic);
      if (cpu::multiplies_integers(arithmetic)) {
        asked.weight_dtype = DType::kI8;
        asked.quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
      }
      std::get<experts::CpuTarget>(asked.target).has_avx_vnni = true;
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

TEST(HostKernel, FirstRowThatFits_IsChosenAndEveryRowGetsAVerdict) {
  const auto asked = problem(DType::kF32, cpu::Isa::kAvx2, cpu::Arithmetic::kF32Fma);
  std::vector<PlanRow> verdicts;
  EXPECT_EQ(experts::choose_host_kernel(asked, {}, verdicts).name, "cpu.avx2");
  EXPECT_EQ(verdicts.size(), experts::host_kernels().rows().size());
  EXPECT_EQ(verdicts.back().reason, "cpu.avx2 comes first");
}

TEST(KernelCatalog, OneRowOfADevice_IsTheReference) {
  const auto references = [](const auto& rows) {
    return std::count_if(rows.begin(), rows.end(),
                         [](const auto& row) { return row.is_reference; });
  };
  EXPECT_EQ(references(experts::host_kernels().rows()), 1);
  const auto device = experts::device_kernels().rows();
  EXPECT_EQ(references(device), device.empty() ? 0 : 1);
}

// Each structured binding names all fields of a kind, so that a new one needs a line here; all must
// be set, but flags, which some row has.
TEST(KernelCatalog, EveryRow_UsesEveryFieldOfItsKind) {
  const auto check_base = [](const experts::KernelRow& row) {
    const auto& [name, supports] = row;
    EXPECT_FALSE(name.empty());
    EXPECT_NE(supports, nullptr) << name;
  };
  for (const experts::HostKernelRow& row : experts::host_kernels().rows()) {
    check_base(row);
    const auto& [arithmetic, is_reference, make] = static_cast<const experts::HostKernel&>(row);
    EXPECT_FALSE(arithmetic.empty()) << row.name;
    EXPECT_NE(make, nullptr) << row.name;
  }
  bool some_adds_rows = experts::device_kernels().rows().empty();
  bool some_reads_values = experts::device_kernels().rows().empty();
  bool some_reads_factors = experts::device_kernels().rows().size() <= 1;
  for (const experts::DeviceKernelRow& row : experts::device_kernels().rows()) {
    check_base(row);
    const auto& [arithmetic, is_reference, tiles, make, workspace_bytes, cost, adds_rows,
                 reads_factors, decoded, reads_values, decodes_lanes] =
        static_cast<const experts::DeviceKernel&>(row);
    EXPECT_FALSE(arithmetic.empty()) << row.name;
    EXPECT_NE(tiles, nullptr) << row.name;
    EXPECT_NE(make, nullptr) << row.name;
    EXPECT_NE(workspace_bytes, nullptr) << row.name;
    EXPECT_GT(cost.product_share, 0) << row.name;
    EXPECT_GT(cost.memory_share, 0) << row.name;
    some_adds_rows |= adds_rows;
    some_reads_factors |= reads_factors;
    some_reads_values |= reads_values;
    EXPECT_TRUE(decoded == DType::kBF16 || reads_factors) << row.name;
    // Bytes of scales are factors, and rows beside such weights stay codes.
    EXPECT_TRUE(!decodes_lanes || (reads_factors && !reads_values)) << row.name;
  }
  EXPECT_TRUE(some_adds_rows);
  EXPECT_TRUE(some_reads_factors);
  EXPECT_TRUE(some_reads_values);
  for (const experts::OneLaunchRow& row : experts::one_launch_kernels().rows()) {
    check_base(row);
    const auto& [reach, make, workspace_bytes] = static_cast<const experts::OneLaunch&>(row);
    EXPECT_NE(reach, nullptr) << row.name;
    EXPECT_NE(make, nullptr) << row.name;
    EXPECT_NE(workspace_bytes, nullptr) << row.name;
  }
}

TEST(KernelCatalog, AllRowsOfAType_ShareOnePackedLayout) {
  for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto catalog = experts::host_kernels();
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
