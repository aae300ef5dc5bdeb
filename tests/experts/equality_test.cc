// Tests bit equality: catalog rows with float32 arithmetic, and any row in any batch.
#include "experts/expert_case.h"
#include "support/in_sample.h"

namespace conclave::testing {
namespace {

// Index of the first element whose bits differ, or -1. NaNs are equal to each other.
int64_t first_difference(std::span<const float> a, std::span<const float> b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const bool both_nan = std::isnan(a[i]) && std::isnan(b[i]);
    if (!both_nan && std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return static_cast<int64_t>(i);
  }
  return -1;
}

TEST(KernelRows, F32Arithmetic_AllEqualBitForBit) {
  for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t h : {33, 96, 130}) {
      const CaseShape shape{.hidden_size = h,
                            .intermediate_size = h / 2 + 3,
                            .weights = weights,
                            .rows_per_expert = {1, 2, 3, 4, 5, 6, 7, 0, 29}};
      const ExpertCase test_case(shape);
      SerialExecutor executor;
      std::vector<float> reference;
      auto rows = usable_rows(test_case);
      std::reverse(rows.begin(), rows.end());
      ASSERT_EQ(rows.front().row->name, "cpu.reference");
      for (const UsableRow& usable : rows) {
        if (usable.row->arithmetic != cpu::to_string(cpu::Arithmetic::kF32Fma)) continue;
        const std::vector<float> out = test_case.run(*usable.kernel, executor);
        if (reference.empty()) reference = out;
        EXPECT_EQ(first_difference(out, reference), -1) << usable.row->name << describe(shape);
      }
    }
  }
}

TEST(KernelRows, F32ArithmeticOfEveryActivation_AllEqualBitForBit) {
  ExpertCase test_case(CaseShape{.hidden_size = 70,
                                 .intermediate_size = 45,
                                 .weights = DType::kF16,
                                 .rows_per_expert = {1, 9}});
  for (const ActivationSpec& activation : all_activations()) {
    for (const bool has_bias : {false, true}) {
      test_case.set_activation(activation, has_bias);
      SerialExecutor executor;
      std::vector<float> reference;
      for (const UsableRow& usable : usable_rows(test_case)) {
        const std::vector<float> out = test_case.run(*usable.kernel, executor);
        if (reference.empty()) reference = out;
        EXPECT_EQ(first_difference(out, reference), -1)
            << usable.row->name << " " << describe(test_case.shape());
      }
    }
  }
}

// Gates range from subnormal to overflowing: the activation is one formula on every instruction
// set.
TEST(KernelRows, ExtremeGates_AllEqualBitForBit) {
  for (const float scale : {1e-38F, 1e-20F, 1e-3F, 30.0F, 300.0F, 1e20F, 3e38F}) {
    ExpertCase test_case(CaseShape{.hidden_size = 48,
                                   .intermediate_size = 100,
                                   .weights = DType::kF32,
                                   .rows_per_expert = {13}});
    for (float& value : test_case.hidden()) value *= scale;
    SerialExecutor executor;
    std::vector<float> reference;
    for (const UsableRow& usable : usable_rows(test_case)) {
      const std::vector<float> out = test_case.run(*usable.kernel, executor);
      if (reference.empty()) reference = out;
      EXPECT_EQ(first_difference(out, reference), -1) << usable.row->name << " scale " << scale;
    }
  }
}

// One token's row for one expert, alone and among others.
struct Needle {
  std::vector<float> alone;
  std::vector<float> among;
};

Needle find_needle(const experts::HostKernelRow& row, const CaseShape& shape, int64_t rows,
                   int64_t position, Executor& executor) {
  const int64_t h = shape.hidden_size;
  CaseShape crowd_shape = shape;
  crowd_shape.rows_per_expert = {4, rows, 9};
  const ExpertCase crowd(crowd_shape);
  CaseShape alone_shape = shape;
  alone_shape.rows_per_expert = {0, 1, 0};
  ExpertCase alone(alone_shape);
  const int64_t slot = 4 + position;
  alone.experts() = const_cast<ExpertCase&>(crowd).experts();
  const float* source = const_cast<ExpertCase&>(crowd).hidden().data() +
                        crowd.source_row()[static_cast<size_t>(slot)] * h;
  std::copy_n(source, h, alone.hidden().data() + alone.source_row()[0] * h);

  const auto kernel = row.make(crowd.problem(cpu::best_isa(), row));
  const std::vector<float> all = crowd.run(*kernel, executor);
  SerialExecutor one;
  return {.alone = alone.run(*kernel, one),
          .among = {all.begin() + slot * h, all.begin() + (slot + 1) * h}};
}

void expect_batch_invariant(const CaseShape& shape) {
  const ExpertCase probe(shape);
  auto place = static_cast<size_t>(shape.weights);
  for (const UsableRow& usable : usable_rows(probe)) {
    for (const int64_t rows : {1, 2, 3, 5, 6, 7, 13, 31, 32, 33, 97, 200}) {
      if (!in_sample(place++, 3)) continue;
      // Emulated tiles are slow, and have no other paths beyond two groups.
      if (usable.row == &emulated_amx_row() && rows > 33) continue;
      for (const int64_t position : {int64_t{0}, rows / 2, rows - 1}) {
        ThreadExecutor executor(2);
        const Needle needle = find_needle(*usable.row, shape, rows, position, executor);
        EXPECT_EQ(first_difference(needle.alone, needle.among), -1)
            << usable.row->name << " " << describe(shape) << " row " << position << " of " << rows;
      }
    }
  }
}

TEST(KernelRows, NeedleTokenInAnyBatch_SameBits) {
  for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16}) {
    expect_batch_invariant(
        {.hidden_size = 130, .intermediate_size = 72, .weights = weights, .rows_per_expert = {1}});
  }
}

TEST(KernelRows, NeedleTokenWithoutGateWithBiases_SameBits) {
  expect_batch_invariant({.hidden_size = 130,
                          .intermediate_size = 72,
                          .weights = DType::kBF16,
                          .rows_per_expert = {1},
                          .activation = {.name = "gelu_no_mul"},
                          .has_bias = true});
}

// Control: the test notices a kernel whose order of sums depends on the batch.
TEST(KernelRows, SumInAnotherOrder_IsNoticed) {
  const CaseShape shape{
      .hidden_size = 130, .intermediate_size = 72, .weights = DType::kF32, .rows_per_expert = {1}};
  ExpertCase test_case(shape);
  SerialExecutor executor;
  const auto kernel = experts::host_kernels()
                          .find("cpu.reference", "kernel")
                          .make(test_case.problem(cpu::Isa::kScalar, cpu::Arithmetic::kF32Fma));
  const std::vector<float> forward = test_case.run(*kernel, executor);
  // The same sums with k reversed, by reversing the columns of gate and up and the hidden row.
  for (StoredMatrix* matrix : {&test_case.experts()[0].gate, &test_case.experts()[0].up}) {
    for (int64_t i = 0; i < shape.intermediate_size; ++i) {
      for (int64_t k = 0; k < shape.hidden_size / 2; ++k) {
        const int64_t a = i * shape.hidden_size + k;
        const int64_t b = i * shape.hidden_size + shape.hidden_size - 1 - k;
        const auto left = static_cast<float>(matrix->at(a));
        matrix->set(a, static_cast<float>(matrix->at(b)));
        matrix->set(b, left);
      }
    }
  }
  float* x = test_case.hidden().data() + test_case.source_row()[0] * shape.hidden_size;
  std::reverse(x, x + shape.hidden_size);
  const std::vector<float> reversed = test_case.run(*kernel, executor);
  EXPECT_NE(first_difference(forward, reversed), -1);
}

}  // namespace
}  // namespace conclave::testing
