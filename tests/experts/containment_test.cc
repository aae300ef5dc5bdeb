// A NaN or an infinity reaches the rows that use it and no others.
#include "experts/expert_case.h"

namespace conclave::testing {
namespace {

// These sizes need padding in both products, which makes them dangerous.
const CaseShape kShape{.hidden_size = 37,
                       .intermediate_size = 41,
                       .weights = DType::kBF16,
                       .rows_per_expert = {7, 0, 1, 14}};

bool row_is_finite(std::span<const float> row) {
  return std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); });
}

std::span<const float> row_of(const std::vector<float>& out, int64_t slot, int64_t width) {
  return {out.data() + slot * width, static_cast<size_t>(width)};
}

// Rows for which `touched` holds must be non-finite; all others must have the bits of the clean
// run.
template <class Touched>
void expect_contained(ExpertCase& poisoned, const Touched& touched, const std::string& what) {
  const ExpertCase clean(poisoned.shape());
  SerialExecutor executor(2);
  for (const UsableRow& usable : usable_rows(clean)) {
    const std::vector<float> expected = clean.run(*usable.kernel, executor);
    const std::vector<float> out = poisoned.run(*usable.kernel, executor);
    const int64_t width = clean.shape().hidden_size;
    for (int64_t slot = 0; slot < clean.num_slots(); ++slot) {
      const auto row = row_of(out, slot, width);
      if (touched(slot)) {
        EXPECT_FALSE(row_is_finite(row)) << usable.row->name << ", " << what << ", slot " << slot;
      } else {
        EXPECT_EQ(std::memcmp(row.data(), row_of(expected, slot, width).data(), row.size_bytes()),
                  0)
            << usable.row->name << ", " << what << ", slot " << slot;
      }
    }
  }
}

class Containment : public ::testing::TestWithParam<float> {};

TEST_P(Containment, OneActivation_TouchesOnlyRowsOfItsToken) {
  for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16}) {
    CaseShape shape = kShape;
    shape.weights = weights;
    for (const int64_t column : {int64_t{0}, shape.hidden_size - 1}) {
      ExpertCase poisoned(shape);
      const int64_t token = poisoned.source_row()[9];
      poisoned.hidden()[static_cast<size_t>(token * shape.hidden_size + column)] = GetParam();
      expect_contained(
          poisoned,
          [&](int64_t slot) { return poisoned.source_row()[static_cast<size_t>(slot)] == token; },
          "activation " + std::to_string(GetParam()));
    }
  }
}

TEST_P(Containment, OneWeight_TouchesOnlyRowsOfItsExpert) {
  for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16}) {
    CaseShape shape = kShape;
    shape.weights = weights;
    const int64_t last = shape.hidden_size * shape.intermediate_size - 1;
    for (const int64_t index : {int64_t{0}, last}) {
      for (StoredMatrix StoredExpert::*matrix : {&StoredExpert::up, &StoredExpert::down}) {
        ExpertCase poisoned(shape);
        (poisoned.experts()[3].*matrix).set(index, GetParam());
        expect_contained(
            poisoned, [&](int64_t slot) { return poisoned.expert_of_slot(slot) == 3; },
            "weight " + std::to_string(GetParam()));
      }
    }
  }
}

// Clamps let a NaN through, and columns that pad a panel keep it out of other experts' rows.
TEST(ContainedNan, EveryActivationWithBiases_TouchesOnlyItsRows) {
  for (const ActivationSpec& activation : all_activations()) {
    for (const bool in_bias : {false, true}) {
      CaseShape shape = kShape;
      shape.activation = activation;
      shape.has_bias = true;
      ExpertCase poisoned(shape);
      StoredExpert& expert = poisoned.experts()[3];
      (in_bias ? expert.up_bias : expert.up).set(shape.intermediate_size - 1, NAN);
      expect_contained(
          poisoned, [&](int64_t slot) { return poisoned.expert_of_slot(slot) == 3; },
          activation.name + (in_bias ? " bias" : " weight"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Values, Containment,
                         ::testing::Values(std::numeric_limits<float>::quiet_NaN(),
                                           std::numeric_limits<float>::infinity()),
                         [](const auto& tested) {
                           return std::isnan(tested.param) ? std::string("Nan")
                                                           : std::string("Inf");
                         });

}  // namespace
}  // namespace conclave::testing
