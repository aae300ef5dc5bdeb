// Compares every kernel row with float64, over shapes around all block sizes.
#include "experts/expert_case.h"
#include "support/sanitizers.h"

namespace conclave::testing {
namespace {

void expect_accurate(const CaseShape& shape) {
  const ExpertCase test_case(shape);
  std::vector<std::vector<double>> expected;
  for (int64_t slot = 0; slot < test_case.num_slots(); ++slot) {
    expected.push_back(test_case.oracle(slot));
  }
  SerialExecutor executor(3);
  for (const UsableRow& usable : usable_rows(test_case)) {
    const std::vector<float> out = test_case.run(*usable.kernel, executor);
    const double bound = mlp_error(precision(shape, *usable.kernel));
    for (int64_t slot = 0; slot < test_case.num_slots(); ++slot) {
      const double error =
          relative_l2(out.data() + slot * shape.hidden_size,
                      expected[static_cast<size_t>(slot)].data(), shape.hidden_size);
      EXPECT_LE(error, bound) << usable.row->name << " " << describe(shape) << " slot " << slot;
    }
  }
}

class Accuracy : public ::testing::TestWithParam<DType> {};

TEST_P(Accuracy, HiddenSizesAroundBlocks_WithinBound) {
  for (const int64_t h : {1, 2, 31, 32, 33, 63, 64, 65, 72, 96, 130}) {
    expect_accurate({.hidden_size = h,
                     .intermediate_size = 40,
                     .weights = GetParam(),
                     .rows_per_expert = {1, 0, 7}});
  }
}

TEST_P(Accuracy, IntermediateSizesAroundBlocks_WithinBound) {
  for (const int64_t i : {1, 2, 31, 32, 33, 63, 64, 65, 72, 96, 130}) {
    expect_accurate({.hidden_size = 40,
                     .intermediate_size = i,
                     .weights = GetParam(),
                     .rows_per_expert = {6, 1}});
  }
}

TEST_P(Accuracy, RowCountsAroundTiles_WithinBound) {
  for (const int64_t rows :
       {1, 2, 3, 4, 5, 6, 7, 12, 13, 15, 16, 17, 31, 32, 33, 95, 96, 97, 100, 193}) {
    expect_accurate({.hidden_size = 65,
                     .intermediate_size = 33,
                     .weights = GetParam(),
                     .rows_per_expert = {rows, 0, 1}});
  }
}

TEST_P(Accuracy, UnevenExperts_WithinBound) {
  expect_accurate({.hidden_size = 96,
                   .intermediate_size = 72,
                   .weights = GetParam(),
                   .rows_per_expert = {0, 100, 1, 0, 13, 5, 0, 6, 64, 0}});
}

// Sanitizers watch a quarter of each width, which has the same tiles: whole rows took two fifths
// of the program's time.
TEST_P(Accuracy, RealSizes_WithinBound) {
  constexpr int64_t kShare = CONCLAVE_TEST_ASAN || CONCLAVE_TEST_TSAN ? 4 : 1;
  expect_accurate({.hidden_size = 2048 / kShare,
                   .intermediate_size = 768 / kShare,
                   .weights = GetParam(),
                   .rows_per_expert = {3, 0, 7}});
}

TEST_P(Accuracy, NoRowsAtAll_WritesNothing) {
  expect_accurate({.hidden_size = 64,
                   .intermediate_size = 32,
                   .weights = GetParam(),
                   .rows_per_expert = {0, 0}});
}

INSTANTIATE_TEST_SUITE_P(Weights, Accuracy,
                         ::testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& tested) { return std::string(to_string(tested.param)); });

}  // namespace
}  // namespace conclave::testing
