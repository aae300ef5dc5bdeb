// Layers whose rows become int8 though their weights' form leaves them as they are.
#include "experts/catalog.h"
#include "layer/coded_specs.h"
#include "support/in_sample.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::coded_spec;
using testing::make_layer;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;

MoeSpec plain_rows(DType type) {
  return coded_spec(type, 8, 2, 512, 256,
                    {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32});
}

class Int8Rows : public ::testing::TestWithParam<DType> {};

// docs/numerics.md derives 1e-2: half of it and twice leave room for 64 tokens of one seed.
TEST_P(Int8Rows, ErrorOfTheRows_IsAsStated) {
  const MoeSpec spec = plain_rows(GetParam());
  const OwnedLayer owned = make_layer(with_int8_rows(spec));
  const Tensor hidden = random_tensor(DType::kF32, 64, 512, 3);
  const auto output = run_layer(owned.layer, hidden.view(), DType::kF32);
  const StageCheck like = check_against_reference(*owned.context, owned.layer.spec(), *owned.source,
                                                  output.result(hidden.view()));
  EXPECT_LE(like.worst_token_error, accuracy_bar(GetParam(), DType::kF32));
  const StageCheck unlike =
      check_against_reference(*owned.context, spec, *owned.source, output.result(hidden.view()));
  double squares = 0;
  for (const double error : unlike.token_errors) squares += error * error;
  const double mean = std::sqrt(squares / static_cast<double>(unlike.token_errors.size()));
  RecordProperty("root_mean_square", std::to_string(mean));
  EXPECT_GT(mean, 0.5e-2) << "rows are coded";
  EXPECT_LT(mean, 2e-2);
}

// One arithmetic more, and no other bit.
TEST_P(Int8Rows, EveryInstructionSet_HasTheSameBits) {
  const MoeSpec spec = with_int8_rows(plain_rows(GetParam()));
  const Tensor hidden = random_tensor(DType::kBF16, 40, 512, 4);
  std::vector<std::byte> first;
  for (const std::string& isa : testing::usable_isas()) {
    const Context context({.num_threads = 2, .isa = isa});
    const auto source = make_synthetic_source(spec, 11);
    const MoeLayer layer = MoeLayer::create(context, spec, *source);
    const bool integers = isa != "scalar" && isa != "avx512";
    EXPECT_EQ(layer.plan().arithmetic, integers ? "int8_dot" : "f32_fma") << isa;
    const auto output = run_layer(layer, hidden.view(), DType::kF32);
    const auto* const bytes = output.out.as<std::byte>();
    const std::vector<std::byte> bits(bytes, bytes + 40 * 512 * sizeof(float));
    if (first.empty()) first = bits;
    EXPECT_EQ(bits, first) << isa;
  }
}

bool runs(const Context& context, const MoeSpec& spec, std::string_view kernel) {
  const Plan plan = make_plan(context, spec, {.kernel = std::string(kernel)});
  return std::ranges::any_of(plan.rows,
                             [&](const PlanRow& row) { return row.chosen && row.name == kernel; });
}

// By name, a CPU runs those rows too that it has better ones for.
TEST_P(Int8Rows, EveryRowOfIntegers_HasTheBitsOfTheReference) {
  const MoeSpec spec = with_int8_rows(plain_rows(GetParam()));
  const Context context({.num_threads = 2});
  const auto source = make_synthetic_source(spec, 11);
  size_t place = testing::first_place();
  // One token; a hot expert; more tokens than one block of rows has.
  for (const int64_t tokens : {0, 1, 40, 500}) {
    if (tokens > 1 && !testing::in_sample(place++, 2)) continue;
    const Tensor hidden = random_tensor(DType::kBF16, tokens, 512, 4);
    const auto run = [&](std::string_view kernel) {
      const MoeLayer layer =
          MoeLayer::create(context, spec, *source, {.kernel = std::string(kernel)});
      return run_layer(layer, hidden.view(), DType::kF32).out;
    };
    const Tensor wanted = run("cpu.reference");
    const auto catalog = experts::host_kernels();
    for (const experts::HostKernelRow& row : catalog.rows()) {
      if (row.arithmetic != "int8_dot" || !runs(context, spec, row.name)) continue;
      EXPECT_TRUE(testing::same_bits(run(row.name), wanted)) << row.name << " " << tokens;
    }
  }
}

TEST_P(Int8Rows, OneThreadAndFour_HaveTheSameBits) {
  const MoeSpec spec = with_int8_rows(plain_rows(GetParam()));
  const Tensor hidden = random_tensor(DType::kBF16, 97, 512, 4);
  std::vector<std::byte> first;
  for (const int32_t threads : {1, 4}) {
    const Context context({.num_threads = threads});
    const auto source = make_synthetic_source(spec, 11);
    const MoeLayer layer = MoeLayer::create(context, spec, *source);
    const auto output = run_layer(layer, hidden.view(), DType::kF32);
    const auto* const bytes = output.out.as<std::byte>();
    const std::vector<std::byte> bits(bytes, bytes + 97 * 512 * sizeof(float));
    if (first.empty()) first = bits;
    EXPECT_EQ(bits, first) << threads;
  }
}

INSTANTIATE_TEST_SUITE_P(Weights, Int8Rows, ::testing::Values(DType::kI8, DType::kI4, DType::kF4),
                         [](const auto& test) {
                           return std::string(quant::format_of(test.param).name);
                         });

}  // namespace
}  // namespace conclave
