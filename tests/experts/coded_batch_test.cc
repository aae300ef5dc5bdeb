// Batches of experts whose weights and rows are codes: every row of the table has the bits of the
// reference, in batches of every form.
#include "core/code_bits.h"
#include "cpu/isa.h"
#include "experts/catalog.h"
#include "experts/catalog_cases.h"
#include "experts/expert_case.h"
#include "experts/kernel.h"
#include "experts/quantize_rows.h"
#include "support/case_name.h"
#include "support/executors.h"
#include "support/in_sample.h"

#include "conclave/context.h"
#include "conclave/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

struct CodedBatch {
  DType type = DType::kI8;
  QuantSpec quant = {};
  int64_t hidden = 0;
  int64_t inner = 0;
  std::vector<int64_t> rows_per_expert;
  int64_t bundle_rows = 0;
  bool has_bias = false;
};

struct CodedMatrix {
  std::vector<std::byte> codes;
  std::vector<float> scales;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t groups = 0;

  CodedMatrix(const CodedBatch& batch, int64_t of_rows, int64_t of_cols, std::mt19937& random)
      : rows(of_rows), cols(of_cols) {
    groups = batch.quant.weights == WeightScale::kBlock
                 ? (cols + batch.quant.block_cols - 1) / batch.quant.block_cols
                 : 1;
    codes.resize(static_cast<size_t>(rows * ((cols * bit_size(batch.type) + 7) / 8)));
    for (std::byte& code : codes) code = static_cast<std::byte>(random() & 0xff);
    for (int64_t i = 0; i < rows * groups; ++i) {
      scales.push_back(1e-3F + 1e-6F * static_cast<float>(random() % 1000));
    }
  }
  ConstTensorView view(DType type) const { return {codes.data(), type, {rows, cols}, 0}; }
  ConstTensorView scale_view() const { return {scales.data(), DType::kF32, {rows, groups}, 0}; }
};

std::vector<float> run(const CodedBatch& batch, const experts::HostKernelRow& row,
                       const experts::ExpertsProblem& problem, int threads) {
  std::mt19937 random(7);
  const auto kernel = row.make(problem);
  const auto num_experts = static_cast<int64_t>(batch.rows_per_expert.size());
  const experts::SlabBytes bytes = kernel->slab_bytes();
  AlignedBytes gate_up(bytes.gate_up * static_cast<size_t>(num_experts));
  AlignedBytes down(bytes.down * static_cast<size_t>(num_experts));
  const std::vector<float> bias(static_cast<size_t>(std::max(batch.hidden, batch.inner)), 0.25F);
  const auto bias_of = [&](int64_t size) {
    return batch.has_bias ? ConstTensorView{bias.data(), DType::kF32, {1, size}, 0}
                          : ConstTensorView{};
  };
  for (int64_t e = 0; e < num_experts; ++e) {
    const CodedMatrix gate(batch, batch.inner, batch.hidden, random);
    const CodedMatrix up(batch, batch.inner, batch.hidden, random);
    const CodedMatrix out(batch, batch.hidden, batch.inner, random);
    const auto matrix = [&](const CodedMatrix& coded, int64_t rows) {
      return experts::ExpertMatrix{
          .weights = coded.view(batch.type), .bias = bias_of(rows), .scale = coded.scale_view()};
    };
    kernel->pack({.gate = matrix(gate, batch.inner),
                  .up = matrix(up, batch.inner),
                  .down = matrix(out, batch.hidden)},
                 gate_up.data() + static_cast<size_t>(e) * bytes.gate_up,
                 down.data() + static_cast<size_t>(e) * bytes.down);
  }
  std::vector<float> hidden(static_cast<size_t>(batch.bundle_rows * batch.hidden));
  std::normal_distribution<float> normal(0, 1);
  for (float& value : hidden) value = normal(random);
  std::vector<int64_t> begin;
  std::vector<int64_t> source;
  for (const int64_t count : batch.rows_per_expert) {
    begin.push_back(std::ssize(source));
    for (int64_t i = 0; i < count; ++i) {
      source.push_back(static_cast<int64_t>(random()) % batch.bundle_rows);
    }
  }
  SerialExecutor executor(threads);
  const experts::BatchRequirements needs = kernel->requirements();
  AlignedBytes rows(static_cast<size_t>(batch.bundle_rows * needs.row_bytes));
  const ConstTensorView view{hidden.data(), DType::kF32, {batch.bundle_rows, batch.hidden}, 0};
  const RowBundle bundle =
      experts::quantize_rows(view, needs.row_dtype, needs.row_bytes, rows.data(), executor);
  AlignedBytes workspace(kernel->workspace_bytes(std::ssize(source), threads));
  std::vector<float> out(source.size() * static_cast<size_t>(batch.hidden), NAN);
  kernel->run({.bundle = bundle,
               .num_local_experts = num_experts,
               .num_slots = std::ssize(source),
               .expert_begin = begin.data(),
               .expert_count = batch.rows_per_expert.data(),
               .source_row = source.data()},
              {.gate_up = gate_up.data(),
               .down = down.data(),
               .input_scale = 0.02F,
               .intermediate_scale = 0.01F},
              {.rows = out.data(), .row_stride = batch.hidden}, workspace.span(), executor);
  return out;
}

experts::ExpertsProblem problem_of(const CodedBatch& batch, const experts::HostKernelRow& row) {
  return {.num_local_experts = std::ssize(batch.rows_per_expert),
          .hidden_size = batch.hidden,
          .intermediate_size = batch.inner,
          .weight_dtype = batch.type,
          .quant = batch.quant,
          .activation = activation::parse_activation({}),
          .has_bias = batch.has_bias,
          .target = experts::CpuTarget{.isa = cpu::best_isa(),
                                       .arithmetic = cpu::parse_arithmetic(row.arithmetic),
                                       .has_avx_vnni = cpu::has_avx_vnni()}};
}

std::vector<CodedBatch> batches() {
  const QuantSpec token{.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
  const QuantSpec fixed{.weights = WeightScale::kTensor,
                        .activations = ActivationScale::kTensorStatic};
  const QuantSpec group{.weights = WeightScale::kBlock,
                        .block_rows = 1,
                        .block_cols = 32,
                        .activations = ActivationScale::kGroup,
                        .activation_group = 32};
  std::vector<CodedBatch> all;
  for (const DType type : {DType::kI8, DType::kI4, DType::kF4}) {
    for (QuantSpec quant : {token, fixed, group}) {
      quant.activation_dtype = DType::kI8;
      // Rows that no expert reads; rows that many read; a share of tiles and blocks.
      all.push_back({type, quant, 130, 70, {1, 0, 2}, 40});
      all.push_back({type, quant, 130, 70, {7, 0, 12, 97}, 5, true});
      all.push_back({type, quant, 2051, 1029, {3}, 3});
      all.push_back({type, quant, 1, 1, {1, 1}, 1});
      all.push_back({type, quant, 64, 32, {0, 0}, 3});
    }
  }
  return all;
}

// Behind the last row of the catalog there is the row of tiles over emulation.
const experts::HostKernelRow& tested_row(size_t place) {
  static const auto catalog = experts::host_kernels();
  return place < catalog.rows().size() ? catalog.rows()[place] : emulated_amx_int8_row();
}

class CodedBatchRow : public ::testing::TestWithParam<size_t> {};

// A skipped case is listed by ctest, and scripts/test names the row.
TEST_P(CodedBatchRow, AnyBatch_HasTheBitsOfTheReference) {
  const auto catalog = experts::host_kernels();
  const experts::HostKernelRow& row = tested_row(GetParam());
  const experts::HostKernelRow& reference = catalog.rows().back();
  size_t place = GetParam();
  for (const CodedBatch& batch : batches()) {
    if (!in_sample(place++, 4)) continue;
    const auto problem = problem_of(batch, row);
    if (const Support here = row.supports(problem); !here) {
      GTEST_SKIP() << "not run here: " << row.name << " (" << here.reason() << ")";
    }
    const std::vector<float> found = run(batch, row, problem, 3);
    const std::vector<float> wanted = run(batch, reference, problem_of(batch, reference), 1);
    EXPECT_EQ(found, wanted) << row.name << " " << to_string(batch.type) << " H=" << batch.hidden;
    for (const float value : wanted) ASSERT_TRUE(std::isfinite(value));
  }
}

// Those of bf16 take no rows that are quantised.
std::vector<size_t> rows_of_codes() {
  std::vector<size_t> places = catalog_places([](cpu::Arithmetic arithmetic) {
    return arithmetic == cpu::Arithmetic::kF32Fma || cpu::multiplies_integers(arithmetic);
  });
  places.push_back(experts::host_kernels().rows().size());
  return places;
}

INSTANTIATE_TEST_SUITE_P(Catalog, CodedBatchRow, ::testing::ValuesIn(rows_of_codes()),
                         [](const auto& tested) {
                           return case_name(std::string(tested_row(tested.param).name));
                         });

}  // namespace
}  // namespace conclave::testing
