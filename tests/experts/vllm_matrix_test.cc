// Runs shapes that vLLM tests its CPU fused MoE on: E 8; H and I 128 or 2880; batches of 1, 64 and
// 256; every activation; with or without biases; bf16.
#include "experts/expert_case.h"

#include <tuple>

namespace conclave::testing {
namespace {

// With two experts per token, 2 T rows are spread over eight experts; one is idle unless all get
// rows.
std::vector<int64_t> spread_rows(int64_t tokens) {
  std::vector<int64_t> rows(8, 0);
  for (int64_t slot = 0; slot < 2 * tokens; ++slot) ++rows[static_cast<size_t>(slot * slot % 7)];
  rows[7] = tokens > 1 ? 1 : 0;
  return rows;
}

// Compares each fast row with float64 at some slots. The slow ones, reference and emulation, are
// compared with the fast ones elsewhere, in small cases.
void expect_accurate(const ExpertCase& test_case, int64_t num_checked, size_t max_rows = 8) {
  const CaseShape& shape = test_case.shape();
  const int64_t step = std::max<int64_t>(1, test_case.num_slots() / num_checked);
  ThreadExecutor executor(2);
  std::vector<std::vector<double>> expected;
  for (int64_t slot = 0; slot < test_case.num_slots(); slot += step) {
    expected.push_back(test_case.oracle(slot));
  }
  auto rows = usable_rows(test_case);
  if (test_case.num_slots() > 8) {
    std::erase_if(rows, [](const UsableRow& usable) {
      return usable.row->name == "cpu.reference" || usable.row == &emulated_amx_row();
    });
  }
  if (rows.size() > max_rows) rows.erase(rows.begin() + static_cast<int64_t>(max_rows), rows.end());
  for (const UsableRow& usable : rows) {
    const std::vector<float> out = test_case.run(*usable.kernel, executor);
    const double bound = mlp_error(precision(shape, *usable.kernel));
    for (size_t i = 0; i < expected.size(); ++i) {
      const int64_t slot = static_cast<int64_t>(i) * step;
      const double error =
          relative_l2(out.data() + slot * shape.hidden_size, expected[i].data(), shape.hidden_size);
      EXPECT_LE(error, bound) << usable.row->name << " " << describe(shape) << " slot " << slot;
    }
  }
}

using Sizes = std::tuple<int64_t, int64_t, int64_t>;  // H, I, T

class VllmMatrixCpuFusedMoe : public ::testing::TestWithParam<Sizes> {};

TEST_P(VllmMatrixCpuFusedMoe, EveryActivation_WithinBound) {
  const auto& [hidden, intermediate, tokens] = GetParam();
  ExpertCase test_case(CaseShape{.hidden_size = hidden,
                                 .intermediate_size = intermediate,
                                 .weights = DType::kBF16,
                                 .rows_per_expert = spread_rows(tokens),
                                 .distinct_experts = hidden * intermediate > 20000 ? 3 : 0});
  bool has_bias = false;
  for (const ActivationSpec& activation : all_activations()) {
    test_case.set_activation(activation, has_bias);
    expect_accurate(test_case, 3);
    has_bias = !has_bias;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, VllmMatrixCpuFusedMoe,
                         ::testing::Values(Sizes{128, 128, 1}, Sizes{128, 128, 64},
                                           Sizes{128, 128, 256}, Sizes{128, 2880, 1},
                                           Sizes{128, 2880, 64}, Sizes{128, 2880, 256},
                                           Sizes{2880, 128, 1}, Sizes{2880, 128, 64},
                                           Sizes{2880, 128, 256}),
                         [](const auto& tested) {
                           return "H" + std::to_string(std::get<0>(tested.param)) + "I" +
                                  std::to_string(std::get<1>(tested.param)) + "T" +
                                  std::to_string(std::get<2>(tested.param));
                         });

// gpt-oss has sizes that are no multiple of 64 tiles, of 128 or of anything else that kernels like.
TEST(VllmMatrixCpuFusedMoeLarge, GptOssSizesWithBiases_WithinBound) {
  const ExpertCase test_case(
      CaseShape{.hidden_size = 2880,
                .intermediate_size = 2880,
                .weights = DType::kBF16,
                .rows_per_expert = spread_rows(64),
                .activation = {.name = "swiglu_oai", .limit = 7.0, .alpha = 1.702, .beta = 1.0},
                .has_bias = true,
                .distinct_experts = 1});
  expect_accurate(test_case, 1, 2);
}

}  // namespace
}  // namespace conclave::testing
