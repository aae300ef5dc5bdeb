// Compares every row of the table of device kernels, in each of its tiles, with the float64 oracle:
// each format at sizes that do not fill tiles, each activation, each way tokens may fall on
// experts.
#include "experts/catalog.h"
#include "kernel_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace conclave::testing {

namespace {

using experts::DeviceKernelRow;
using experts::DeviceTile;

// Token counts at the tile sizes of `row`, and one below and one above them.
std::vector<int64_t> edge_counts(const DeviceKernelRow& row, const CudaProblem& problem) {
  std::vector<int64_t> counts;
  for (const DeviceTile& tile : row.tiles(problem.sizes())) {
    for (const int64_t count : {tile.tokens - 1, tile.tokens, tile.tokens + 1}) {
      if (count > 0 && std::find(counts.begin(), counts.end(), count) == counts.end()) {
        counts.push_back(count);
      }
    }
  }
  return counts;
}

class DeviceKernels : public HopperFixture, public ::testing::TestWithParam<DeviceKernelRow> {
 protected:
  void SetUp() override {
    const std::string reason = reason_to_skip();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  // Runs all tiles of the row on one problem. Returns false if the row does not support it.
  bool check(const CudaProblemOptions& options, double tolerance) {
    CudaProblem problem(options);
    return check(problem, tolerance);
  }
  bool check(CudaProblem& problem, double tolerance) {
    if (!GetParam().supports(problem.sizes())) return false;
    for (const DeviceTile& tile : all_tiles(GetParam(), problem)) {
      check_tile(problem, tile, tolerance);
    }
    return true;
  }
  void check_tile(CudaProblem& problem, const DeviceTile& tile, double tolerance) {
    const bool sums_in_float32 = GetParam().is_reference;
    problem.set_ambiguity(sums_in_float32 ? kFloat32Ambiguity : kTensorCoreAmbiguity);
    KernelRunner runner(problem, GetParam(), tile);
    runner.run();
    const RowErrors errors = problem.check_rows(runner.output());
    EXPECT_TRUE(within(errors, tolerance))
        << GetParam().name << ' ' << to_string(tile) << ": " << text_of(problem.options()) << ": "
        << errors.describe();
    EXPECT_EQ(runner.damage(), 0) << GetParam().name << ' ' << to_string(tile);
    note(errors);
  }

  void TearDown() override { record(); }
};

TEST_P(DeviceKernels, EachFormat_OddSizes_MatchesOracle) {
  const CudaProblemOptions shapes[] = {
      {.num_experts = 6, .top_k = 1, .hidden_size = 200, .intermediate_size = 136, .num_tokens = 1},
      {.num_experts = 10,
       .top_k = 5,
       .hidden_size = 264,
       .intermediate_size = 328,
       .num_tokens = 37},
      {.num_experts = 6,
       .top_k = 3,
       .hidden_size = 1032,
       .intermediate_size = 120,
       .num_tokens = 70,
       .routing = RoutingKind::kHoles},
      {.num_experts = 60,
       .top_k = 4,
       .hidden_size = 256,
       .intermediate_size = 384,
       .num_tokens = 9},
      {.num_experts = 2,
       .top_k = 2,
       .hidden_size = 512,
       .intermediate_size = 256,
       .num_tokens = 300},
  };
  for (const KernelFormat& format : kernel_formats()) {
    for (const CudaProblemOptions& shape : shapes) {
      SCOPED_TRACE(format.name);
      check(with_format(shape, format), format.tolerance);
    }
  }
}

// Each shape uses another tile, so that all tiles have their turn.
TEST_P(DeviceKernels, EachFormat_SmallShapes_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    size_t turn = 0;
    for (const CudaProblemOptions& shape : small_shapes()) {
      CudaProblem problem(with_format(shape, format));
      if (!GetParam().supports(problem.sizes())) continue;
      const std::vector<DeviceTile> tiles = all_tiles(GetParam(), problem);
      check_tile(problem, tiles[turn++ % tiles.size()], format.tolerance);
    }
  }
}

// The length of these rows is no multiple of 8: they are stored apart, as a layer pads them.
TEST_P(DeviceKernels, EachFormat_SizesThatNothingDivides_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (const int64_t inner : {67, 129}) {
      check(with_format({.num_experts = 5,
                         .top_k = 2,
                         .hidden_size = 131,
                         .intermediate_size = inner,
                         .num_tokens = 23},
                        format),
            format.tolerance);
    }
  }
}

TEST_P(DeviceKernels, EachActivation_WithAndWithoutBias_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (const ActivationSpec& activation : kernel_activations()) {
      for (const bool bias : {false, true}) {
        check(with_format({.num_experts = 4,
                           .top_k = 2,
                           .hidden_size = 264,
                           .intermediate_size = 136,
                           .num_tokens = 21,
                           .activation = activation,
                           .has_bias = bias},
                          format),
              format.tolerance);
      }
    }
  }
}

TEST_P(DeviceKernels, OneHotExpert_TileSizesPlusMinusOne_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    CudaProblem problem(with_format({.num_experts = 4,
                                     .top_k = 1,
                                     .hidden_size = 136,
                                     .intermediate_size = 264,
                                     .num_tokens = 1,
                                     .routing = RoutingKind::kOneHot},
                                    format));
    for (const int64_t count : edge_counts(GetParam(), problem)) {
      problem.set_batch({.num_tokens = count, .routing = RoutingKind::kOneHot});
      check(problem, format.tolerance);
    }
  }
}

TEST_P(DeviceKernels, WeightOnInput_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    check(with_format({.num_experts = 5,
                       .top_k = 2,
                       .hidden_size = 256,
                       .intermediate_size = 192,
                       .num_tokens = 33,
                       .has_bias = true,
                       .weight_on_input = true},
                      format),
          format.tolerance);
  }
}

TEST_P(DeviceKernels, Zipf_ManyTokens_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    check(with_format({.num_experts = 32,
                       .top_k = 4,
                       .hidden_size = 512,
                       .intermediate_size = 384,
                       .num_tokens = 2000,
                       .routing = RoutingKind::kZipf},
                      format),
          format.tolerance);
  }
}

// Model sizes give more tiles than multiprocessors, in several waves.
TEST_P(DeviceKernels, ModelSizes_FewAndManyTokens_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (const int64_t tokens : {1, 33, 600}) {
      check(with_format({.num_experts = 32,
                         .top_k = 4,
                         .hidden_size = 2880,
                         .intermediate_size = 2880,
                         .num_tokens = tokens,
                         .has_bias = true},
                        format),
            format.tolerance);
      check(with_format({.num_experts = 128,
                         .top_k = 8,
                         .hidden_size = 2048,
                         .intermediate_size = 768,
                         .num_tokens = tokens},
                        format),
            format.tolerance);
    }
  }
}

TEST_P(DeviceKernels, NoRows_WritesNothing) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    CudaProblem problem(with_format({.num_experts = 4, .top_k = 1, .num_tokens = 1}, format));
    // Searches for a batch with one token whose only id is -1.
    uint64_t seed = 1;
    while (problem.host_ids(0)[0] >= 0) {
      problem.set_batch({.num_tokens = 1, .routing = RoutingKind::kHoles, .seed = ++seed});
    }
    check(problem, 0);
  }
}

// A row gives the same bits in every run, tile and batch, and so does every kernel with the same
// arithmetic.
void expect_same_bits(const DeviceKernelRow& own, const CudaProblemOptions& options) {
  CudaProblem problem(options);
  if (!own.supports(problem.sizes())) return;
  KernelRunner first(problem, own, all_tiles(own, problem).front());
  first.run();
  const auto expected = first.bits();
  for (const DeviceKernelRow& row : rows_without_factors()) {
    const bool same =
        row.name == own.name || (!row.arithmetic.empty() && row.arithmetic == own.arithmetic);
    if (!same || !row.supports(problem.sizes())) continue;
    for (const DeviceTile& tile : all_tiles(row, problem)) {
      KernelRunner runner(problem, row, tile);
      runner.run();
      EXPECT_TRUE(runner.bits() == expected)
          << own.name << " and " << row.name << ' ' << to_string(tile) << ": " << text_of(options);
    }
  }
}

TEST_P(DeviceKernels, EachTile_SameArithmetic_SameBits) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (const bool bias : {true, false}) {
      for (const bool weight_on_input : {false, true}) {
        expect_same_bits(GetParam(), with_format({.num_experts = 6,
                                                  .top_k = 2,
                                                  .hidden_size = 520,
                                                  .intermediate_size = 392,
                                                  .num_tokens = 300,
                                                  .has_bias = bias,
                                                  .weight_on_input = weight_on_input,
                                                  .routing = RoutingKind::kZipf},
                                                 format));
      }
    }
  }
}

// The number of features is odd, so the last one has no neighbour.
TEST_P(DeviceKernels, EachActivation_SameArithmetic_SameBits) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (const ActivationSpec& activation : kernel_activations()) {
      for (const bool bias : {true, false}) {
        expect_same_bits(GetParam(), with_format({.num_experts = 3,
                                                  .top_k = 2,
                                                  .hidden_size = 264,
                                                  .intermediate_size = 139,
                                                  .num_tokens = 151,
                                                  .activation = activation,
                                                  .has_bias = bias},
                                                 format));
      }
    }
  }
}

// A small L2 lets kernels walk token tiles of an expert together, of which it has five: four are
// full and one has few rows.
TEST_P(DeviceKernels, SmallL2_SameBits) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    CudaProblem problem(with_format({.num_experts = 3,
                                     .top_k = 2,
                                     .hidden_size = 264,
                                     .intermediate_size = 520,
                                     .num_tokens = 1600},
                                    format));
    if (!GetParam().supports(problem.sizes())) continue;
    experts::ExpertsProblem small = problem.sizes();
    cuda::DeviceInfo gpu = small.gpu();
    gpu.l2_bytes = 1'000'000;
    small.target = gpu;
    for (const DeviceTile& tile : all_tiles(GetParam(), problem)) {
      KernelRunner usual(problem, GetParam(), tile);
      usual.run();
      KernelRunner runner(problem, GetParam(), tile, small);
      runner.run();
      EXPECT_EQ(usual.bits(), runner.bits()) << to_string(tile);
      EXPECT_EQ(runner.damage(), 0) << to_string(tile);
    }
  }
}

TEST_P(DeviceKernels, ThousandRuns_SameBits) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    CudaProblem problem(with_format({.num_experts = 8,
                                     .top_k = 2,
                                     .hidden_size = 256,
                                     .intermediate_size = 192,
                                     .num_tokens = 45},
                                    format));
    if (!GetParam().supports(problem.sizes())) continue;
    const auto tiles = all_tiles(GetParam(), problem);
    for (const DeviceTile& tile : {tiles.front(), tiles.back()}) {
      KernelRunner runner(problem, GetParam(), tile);
      runner.run();
      const auto expected = runner.bits();
      int different = 0;
      for (int repeat = 1; repeat < 1000; ++repeat) {
        runner.run();
        different += runner.bits() == expected ? 0 : 1;
      }
      EXPECT_EQ(different, 0) << to_string(tile);
    }
  }
}

// A token has a NaN: its rows are NaN throughout, all others keep their bits.
TEST_P(DeviceKernels, NotANumberInOneToken_StaysInItsRows) {
  constexpr int64_t kToken = 17;
  for (const KernelFormat& format : kernel_formats()) {
    // Another stage makes the codes of quantised rows.
    if (format.quant.activations != ActivationScale::kNone) continue;
    SCOPED_TRACE(format.name);
    CudaProblem problem(with_format({.num_experts = 4,
                                     .top_k = 2,
                                     .hidden_size = 136,
                                     .intermediate_size = 72,
                                     .num_tokens = 50},
                                    format));
    if (!GetParam().supports(problem.sizes())) continue;
    for (const DeviceTile& tile : all_tiles(GetParam(), problem)) {
      problem.set_batch({.num_tokens = 50});
      KernelRunner runner(problem, GetParam(), tile);
      runner.run();
      const auto before = runner.bits();
      problem.spoil_token(kToken);
      runner.run();
      const auto after = runner.bits();
      for (int64_t slot = 0; slot < 100; ++slot) {
        const bool own = slot / 2 == kToken;
        EXPECT_EQ(same_row(before, after, slot, 100), !own)
            << "slot " << slot << ' ' << to_string(tile);
      }
      const RowErrors errors = problem.check_rows(runner.output());
      EXPECT_TRUE(within(errors, format.tolerance)) << errors.describe();
    }
  }
}

// A bias makes a value of one expert's intermediate rows infinite or NaN. Its code is NaN, so that
// these rows are NaN throughout; all others keep their bits.
TEST_P(DeviceKernels, IntermediateNotFinite_StaysInItsRows) {
  constexpr int64_t kExpert = 1;
  constexpr int64_t kFeature = 133;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const KernelFormat& format : coded_formats()) {
    for (const ActivationSpec& activation : gated_and_plain()) {
      SCOPED_TRACE(format.name + ' ' + activation.name);
      CudaProblem problem(with_format({.num_experts = 4,
                                       .top_k = 2,
                                       .hidden_size = 136,
                                       .intermediate_size = 136,
                                       .num_tokens = 50,
                                       .activation = activation,
                                       .has_bias = true},
                                      format));
      if (!GetParam().supports(problem.sizes())) continue;
      for (const DeviceTile& tile : all_tiles(GetParam(), problem)) {
        KernelRunner runner(problem, GetParam(), tile);
        problem.set_up_bias(kExpert, kFeature, 0);
        runner.run();
        const auto before = runner.bits();
        for (const float value : {kInfinity, -kInfinity, std::nanf("")}) {
          SCOPED_TRACE(value);
          problem.set_up_bias(kExpert, kFeature, value);
          check_tile(problem, tile, format.tolerance);
          runner.run();
          const auto after = runner.bits();
          for (int64_t slot = 0; slot < 100; ++slot) {
            if (problem.host_ids(0)[static_cast<size_t>(slot)] == kExpert) continue;
            EXPECT_TRUE(same_row(before, after, slot, 100))
                << "slot " << slot << ' ' << to_string(tile);
          }
        }
      }
    }
  }
}

TEST_P(DeviceKernels, TinyIntermediates_MatchesOracle) {
  for (const KernelFormat& format : coded_formats()) {
    for (const ActivationSpec& activation : gated_and_plain()) {
      SCOPED_TRACE(format.name + ' ' + activation.name);
      const CudaProblemOptions options = with_format({.num_experts = 4,
                                                      .top_k = 2,
                                                      .hidden_size = 264,
                                                      .intermediate_size = 264,
                                                      .num_tokens = 70,
                                                      .activation = activation,
                                                      .up_exponent = kTinyExponent},
                                                     format);
      check(options, format.tolerance);
      expect_same_bits(GetParam(), options);
    }
  }
}

// A weight matrix has more than 2^31 elements and 2^32 bytes; the last experts are used.
TEST_P(DeviceKernels, TensorsBeyondFourGigabytes_MatchesOracle) {
  if (cuda::device_info(0).memory_bytes < int64_t{40} << 30) GTEST_SKIP() << "needs 40 GB";
  for (const KernelFormat& format : {kernel_formats()[0], kernel_formats()[3]}) {
    SCOPED_TRACE(format.name);
    check(with_format({.num_experts = 40,
                       .top_k = 2,
                       .hidden_size = 8192,
                       .intermediate_size = 4096,
                       .num_tokens = 60},
                      format),
          format.tolerance);
  }
}

// Rows of one launch take another call: device_decode_test.cc.
std::vector<DeviceKernelRow> all_rows() { return rows_without_factors(); }

std::string name_of(const ::testing::TestParamInfo<DeviceKernelRow>& info) {
  std::string name(info.param.name);
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Catalog, DeviceKernels, ::testing::ValuesIn(all_rows()), name_of);

}  // namespace

}  // namespace conclave::testing
