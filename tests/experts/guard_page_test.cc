// Every buffer of a run borders on an unmapped page, first at its end and then at its beginning;
// inputs stay unchanged, and slots without an owner are not written.
#include "experts/expert_case.h"
#include "support/guarded.h"

namespace conclave::testing {
namespace {

std::vector<std::byte> copy_of(const GuardedBuffer& buffer) {
  return {buffer.data(), buffer.data() + buffer.size()};
}

void expect_unchanged(const GuardedBuffer& buffer, const std::vector<std::byte>& before,
                      const char* name) {
  EXPECT_EQ(std::memcmp(buffer.data(), before.data(), before.size()), 0) << name << " was written";
}

struct GuardedRun {
  const ExpertCase& test_case;
  const UsableRow& usable;
  GuardSide side;

  // A padded batch: expert e owns the slots [e * kSlots, e * kSlots + count).
  static constexpr int64_t kSlots = 40;

  void check() const {
    const CaseShape& shape = test_case.shape();
    const experts::ExpertsKernel& kernel = *usable.kernel;
    const auto num_experts = static_cast<int64_t>(shape.rows_per_expert.size());
    const experts::SlabBytes bytes = kernel.slab_bytes();
    const GuardedBuffer gate_up(bytes.gate_up * size_t(num_experts), side, 0xff);
    const GuardedBuffer down(bytes.down * size_t(num_experts), side, 0xff);
    for (int64_t e = 0; e < num_experts; ++e) {
      kernel.pack(test_case.matrices(e), gate_up.data() + static_cast<size_t>(e) * bytes.gate_up,
                  down.data() + static_cast<size_t>(e) * bytes.down);
    }

    SerialExecutor executor(2);
    const experts::BatchRequirements needs = kernel.requirements();
    auto& hidden = const_cast<ExpertCase&>(test_case).hidden();
    const auto num_tokens = static_cast<int64_t>(hidden.size()) / shape.hidden_size;
    const GuardedBuffer rows(static_cast<size_t>(num_tokens * needs.row_bytes), side, 0xff);
    const RowBundle bundle = experts::quantize_rows(
        {hidden.data(), DType::kF32, Shape{num_tokens, shape.hidden_size}, 0}, needs.row_dtype,
        needs.row_bytes, rows.data(), executor);

    std::vector<int64_t> begin;
    std::vector<int64_t> source_row(static_cast<size_t>(num_experts * kSlots), -1);
    int64_t occupied = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      begin.push_back(e * kSlots);
      for (int64_t r = 0; r < shape.rows_per_expert[size_t(e)]; ++r) {
        source_row[static_cast<size_t>(e * kSlots + r)] =
            test_case.source_row()[size_t(occupied++)];
      }
    }
    const GuardedBuffer workspace(kernel.workspace_bytes(occupied, executor.concurrency()), side,
                                  0xff);
    const GuardedBuffer out(
        static_cast<size_t>(num_experts * kSlots * shape.hidden_size) * sizeof(float), side, 0x7f);
    const auto untouched = copy_of(out);
    const auto gate_up_before = copy_of(gate_up);
    const auto down_before = copy_of(down);
    const auto rows_before = copy_of(rows);

    kernel.run({.bundle = bundle,
                .layout = BatchLayout::kPadded,
                .num_local_experts = num_experts,
                .num_slots = num_experts * kSlots,
                .expert_begin = begin.data(),
                .expert_count = shape.rows_per_expert.data(),
                .source_row = source_row.data()},
               {gate_up.data(), down.data()},
               {.rows = out.as<float>(), .row_stride = shape.hidden_size}, workspace.span(),
               executor);

    expect_unchanged(gate_up, gate_up_before, "gate_up");
    expect_unchanged(down, down_before, "down");
    expect_unchanged(rows, rows_before, "rows");
    const std::vector<float> expected = test_case.run(kernel, executor);
    const auto width = static_cast<size_t>(shape.hidden_size) * sizeof(float);
    int64_t slot = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      for (int64_t r = 0; r < kSlots; ++r) {
        const std::byte* row = out.data() + static_cast<size_t>(e * kSlots + r) * width;
        if (r < shape.rows_per_expert[size_t(e)]) {
          EXPECT_EQ(std::memcmp(row, expected.data() + slot++ * shape.hidden_size, width), 0)
              << "expert " << e << " row " << r;
        } else {
          EXPECT_EQ(std::memcmp(row, untouched.data(), width), 0)
              << "wrote the free slot " << r << " of expert " << e;
        }
      }
    }
  }
};

TEST(GuardPages, AllBuffers_NothingReadOrWrittenBeyond) {
  for (const DType weights : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const auto& [h, i] : {std::pair<int64_t, int64_t>{33, 1}, {64, 32}, {65, 33}, {96, 72}}) {
      const bool plain = i != 33;  // the others have biases and no gate
      const CaseShape shape{.hidden_size = h,
                            .intermediate_size = i,
                            .weights = weights,
                            .rows_per_expert = {7, 0, 1, 33, 16},
                            .activation = {.name = plain ? "silu" : "relu2_no_mul"},
                            .has_bias = !plain};
      const ExpertCase test_case(shape);
      for (const UsableRow& usable : usable_rows(test_case)) {
        for (const GuardSide side : {GuardSide::kEnd, GuardSide::kBegin}) {
          SCOPED_TRACE(std::string(usable.row->name) + " " + describe(shape) +
                       (side == GuardSide::kEnd ? " end" : " begin"));
          GuardedRun{test_case, usable, side}.check();
        }
      }
    }
  }
}

}  // namespace
}  // namespace conclave::testing
