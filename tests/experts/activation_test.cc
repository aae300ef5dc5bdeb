// Runs every kernel row with every activation, with and without biases, and slices of any width.
#include "experts/expert_case.h"

#include <numeric>

namespace conclave::testing {
namespace {

// Compares the rows of `slots` with float64.
void expect_accurate(const ExpertCase& test_case, const std::vector<int64_t>& slots,
                     const UsableRow& usable) {
  const CaseShape& shape = test_case.shape();
  SerialExecutor executor(2);
  const std::vector<float> out = test_case.run(*usable.kernel, executor);
  const double bound = mlp_error(precision(shape, *usable.kernel));
  for (const int64_t slot : slots) {
    const std::vector<double> expected = test_case.oracle(slot);
    const double error =
        relative_l2(out.data() + slot * shape.hidden_size, expected.data(), shape.hidden_size);
    EXPECT_LE(error, bound) << usable.row->name << " " << describe(shape) << " slot " << slot;
  }
}

std::vector<int64_t> every_slot(const ExpertCase& test_case) {
  std::vector<int64_t> slots(static_cast<size_t>(test_case.num_slots()));
  std::iota(slots.begin(), slots.end(), int64_t{0});
  return slots;
}

TEST(KernelRows, EveryActivationWithAndWithoutBiases_WithinBound) {
  for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16}) {
    ExpertCase test_case(CaseShape{.hidden_size = 96,
                                   .intermediate_size = 77,
                                   .weights = weights,
                                   .rows_per_expert = {7, 0, 1, 17}});
    for (const ActivationSpec& activation : all_activations()) {
      for (const bool has_bias : {false, true}) {
        test_case.set_activation(activation, has_bias);
        for (const UsableRow& usable : usable_rows(test_case)) {
          expect_accurate(test_case, {0, 7, 24}, usable);
        }
      }
    }
  }
}

// A tensor-parallel rank may hold any slice of the intermediate size.
TEST(KernelRows, SlicesOfAnyWidth_WithinBound) {
  for (const int64_t width : {0, 1, 31, 32, 33, 45, 63, 64, 65}) {
    for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16}) {
      ExpertCase test_case(CaseShape{.hidden_size = 70,
                                     .intermediate_size = width,
                                     .weights = weights,
                                     .rows_per_expert = {6, 0, 33}});
      for (const char* name : {"gelu", "relu2_no_mul"}) {
        test_case.set_activation({.name = name}, true);
        for (const UsableRow& usable : usable_rows(test_case)) {
          expect_accurate(test_case, every_slot(test_case), usable);
        }
      }
    }
  }
}

TEST(KernelRows, EmptySlice_GivesTheDownBiasOrZeros) {
  ExpertCase test_case(CaseShape{.hidden_size = 70,
                                 .intermediate_size = 0,
                                 .weights = DType::kBF16,
                                 .rows_per_expert = {20, 3}});
  for (const bool has_bias : {false, true}) {
    test_case.set_activation({.name = "silu"}, has_bias);
    SerialExecutor executor(2);
    for (const UsableRow& usable : usable_rows(test_case)) {
      const std::vector<float> out = test_case.run(*usable.kernel, executor);
      for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
        const StoredExpert& expert = test_case.expert(test_case.expert_of_slot(i / 70));
        const double expected = has_bias ? expert.down_bias.at(i % 70) : 0.0;
        ASSERT_EQ(double{out[static_cast<size_t>(i)]}, expected) << usable.row->name;
      }
    }
  }
}

// Biases may be stored in another type than the weights; missing ones are zeros.
TEST(KernelRows, BiasesOfAnotherTypeOrMissing_AreTaken) {
  const CaseShape shape{.hidden_size = 40,
                        .intermediate_size = 45,
                        .weights = DType::kBF16,
                        .rows_per_expert = {3},
                        .has_bias = true};
  const ExpertCase test_case(shape);
  const auto problem = test_case.problem(cpu::Isa::kScalar, cpu::Arithmetic::kF32Fma);
  const auto kernel = experts::host_kernels().find("cpu.reference", "kernel").make(problem);
  const auto packed = [&](const experts::ExpertMatrices& matrices) {
    const experts::SlabBytes bytes = kernel->slab_bytes();
    std::vector<std::byte> slabs(bytes.gate_up + bytes.down);
    kernel->pack(matrices, slabs.data(), slabs.data() + bytes.gate_up);
    return slabs;
  };
  const auto widened = [](const StoredMatrix& bias) {
    std::vector<float> values;
    for (int64_t i = 0; i < bias.cols(); ++i) values.push_back(static_cast<float>(bias.at(i)));
    return values;
  };
  const std::vector<float> up = widened(test_case.expert(0).up_bias);
  const std::vector<float> zeros(up.size());
  const auto view = [](const std::vector<float>& values) {
    return ConstTensorView{values.data(), DType::kF32,
                           Shape{1, static_cast<int64_t>(values.size())}, 0};
  };
  experts::ExpertMatrices matrices = test_case.matrices(0);
  const auto from_bf16 = packed(matrices);
  matrices.up.bias = view(up);
  EXPECT_EQ(packed(matrices), from_bf16);
  matrices.up.bias = {};
  const auto missing = packed(matrices);
  EXPECT_NE(missing, from_bf16);
  matrices.up.bias = view(zeros);
  EXPECT_EQ(packed(matrices), missing);
}

TEST(PackedLayout, BiasesAndMissingGate_AreInItsName) {
  ExpertCase test_case(CaseShape{
      .hidden_size = 64, .intermediate_size = 32, .weights = DType::kBF16, .rows_per_expert = {1}});
  const auto name_with = [&](const char* activation, bool has_bias) {
    test_case.set_activation({.name = activation}, has_bias);
    return usable_rows(test_case).front().kernel->packed_layout();
  };
  EXPECT_EQ(name_with("silu", false), "panel64.k2.v1");
  EXPECT_EQ(name_with("silu", true), "panel64.k2.bias.v1");
  EXPECT_EQ(name_with("relu2_no_mul", false), "panel64.k2.single.v1");
  EXPECT_EQ(name_with("relu2_no_mul", true), "panel64.k2.single.bias.v1");
}

}  // namespace
}  // namespace conclave::testing
