// Tests what the kernels that stream weights report about a problem without a GPU: support, tiles,
// workspace.
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/hopper_support.h"
#include "experts/cuda/sm90/stream/counters.h"
#include "experts/cuda/sm90/stream/stream.h"
#include "experts/cuda/sm90/stream/stream_bytes.h"
#include "experts/cuda/sm90/stream/stream_codes.h"
#include "experts/cuda/sm90/tile_codes/tile_codes.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>

namespace conclave::experts {
namespace {

constexpr QuantSpec kBlockQuant = {.weights = WeightScale::kBlock,
                                   .block_rows = 128,
                                   .block_cols = 128,
                                   .activations = ActivationScale::kGroup};
constexpr QuantSpec kChannelQuant = {.weights = WeightScale::kChannel,
                                     .activations = ActivationScale::kToken};

ExpertsProblem problem(DType dtype, const QuantSpec& quant = {}) {
  ExpertsProblem result;
  result.num_local_experts = 8;
  result.hidden_size = 256;
  result.intermediate_size = 200;
  result.top_k = 2;
  result.max_tokens = 64;
  result.weight_dtype = dtype;
  result.quant = quant;
  result.target = cuda::DeviceInfo{
      .name = "GPU", .capability = {9, 0}, .shared_bytes_per_block = int64_t{227} << 10};
  return result;
}

std::string reason_of(const Support& support) {
  return support ? std::string() : std::string(support.reason());
}

TEST(StreamPlan, OtherDevices_AreNamed) {
  ExpertsProblem older = problem(DType::kBF16);
  older.target = cuda::DeviceInfo{.name = "GPU", .capability = {8, 6}};
  EXPECT_NE(reason_of(stream_sm90_supports(older)).find("found 8.6"), std::string::npos);
  older.weight_dtype = DType::kF8E4M3;
  EXPECT_NE(reason_of(stream_fp8_supports(older)).find("found 8.6"), std::string::npos);
}

TEST(StreamPlan, WeightTypes_GoToOneRow) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    EXPECT_TRUE(stream_sm90_supports(problem(dtype)));
    EXPECT_FALSE(stream_fp8_supports(problem(dtype, kBlockQuant)));
  }
  EXPECT_FALSE(stream_sm90_supports(problem(DType::kF8E4M3, kBlockQuant)));
  EXPECT_EQ(reason_of(stream_sm90_supports(problem(DType::kF32))),
            "takes BF16 or F16 weights; found F32");
  EXPECT_EQ(reason_of(supports_on_hopper(problem(DType::kF32), {DType::kF8E4M3})),
            "takes F8_E4M3 weights; found F32");
}

TEST(StreamPlan, ScalesOfE4m3_AreChecked) {
  const auto supports = [](const QuantSpec& quant) {
    return stream_fp8_supports(problem(DType::kF8E4M3, quant));
  };
  EXPECT_TRUE(supports(kBlockQuant));
  EXPECT_TRUE(supports(kChannelQuant));
  QuantSpec changed = kBlockQuant;
  changed.block_rows = 64;
  EXPECT_NE(reason_of(supports(changed)).find("found 64x128"), std::string::npos);
  changed = kBlockQuant;
  changed.activations = ActivationScale::kToken;
  EXPECT_FALSE(supports(changed));
  changed = kChannelQuant;
  changed.activations = ActivationScale::kGroup;
  EXPECT_FALSE(supports(changed));
  changed.activations = ActivationScale::kTensorStatic;
  EXPECT_TRUE(supports(changed));
  EXPECT_FALSE(supports({}));
}

TEST(StreamPlan, FactorsOfCodes_AreChecked) {
  const auto of_groups = [](int64_t columns) {
    return QuantSpec{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns};
  };
  const auto refusal = [](DType dtype, const QuantSpec& quant) {
    return reason_of(stream_codes_supports(problem(dtype, quant)));
  };
  for (const int64_t columns : {16, 32, 48, 64, 96, 128, 256, 320, 512}) {
    EXPECT_EQ(refusal(DType::kI4, of_groups(columns)), "") << columns;
    EXPECT_EQ(refusal(DType::kI8, of_groups(columns)), "") << columns;
  }
  EXPECT_EQ(refusal(DType::kF4, of_groups(16)), "");
  EXPECT_EQ(refusal(DType::kF8E4M3, {.weights = WeightScale::kBlock}), "");
  for (const WeightScale scale : {WeightScale::kTensor, WeightScale::kChannel}) {
    EXPECT_EQ(refusal(DType::kF8E5M2, {.weights = scale}), "");
  }
  EXPECT_NE(refusal(DType::kI4, of_groups(8)).find("found 8"), std::string::npos);
  EXPECT_NE(refusal(DType::kI8, of_groups(40)).find("found 40"), std::string::npos);
  EXPECT_NE(refusal(DType::kI4, {}).find("with scales"), std::string::npos);
  EXPECT_NE(refusal(DType::kBF16, {}).find("found BF16"), std::string::npos);
  EXPECT_EQ(refusal(DType::kNF4, of_groups(64)), "");
  EXPECT_EQ(refusal(DType::kI8, kChannelQuant), "");
  QuantSpec rows = of_groups(32);
  rows.activations = ActivationScale::kGroup;
  EXPECT_NE(refusal(DType::kI4, rows).find("powers of two"), std::string::npos);
  for (const WeightZero kind : {WeightZero::kPoint, WeightZero::kOffset}) {
    QuantSpec zeros = of_groups(16);
    zeros.zeros = kind;
    for (const DType dtype : {DType::kI4, DType::kI8, DType::kF8E4M3}) {
      EXPECT_EQ(refusal(dtype, zeros), "");
    }
    EXPECT_NE(refusal(DType::kNF4, zeros).find("without zeros"), std::string::npos);
  }
  QuantSpec ordered = of_groups(32);
  ordered.has_column_order = true;
  EXPECT_EQ(refusal(DType::kI4, ordered), "");
  ExpertsProblem slice = problem(DType::kI4, of_groups(64));
  slice.skipped_columns = 32;
  EXPECT_EQ(reason_of(stream_codes_supports(slice)), "");
  slice.skipped_columns = 24;
  EXPECT_NE(reason_of(stream_codes_supports(slice)).find("24 lie before"), std::string::npos);
}

// Layers store scales for as many columns as divide both a group and a kernel's stage.
TEST(StreamPlan, ColumnsThatShareFactors_DivideGroupsAndStages) {
  const auto columns = [](DType dtype, int64_t group, int64_t of_matrix, int64_t skipped = 0) {
    const QuantSpec quant{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = group};
    ExpertsProblem sizes = problem(dtype, quant);
    sizes.intermediate_size = of_matrix;
    sizes.skipped_columns = skipped;
    return down_factor_columns(sizes);
  };
  EXPECT_EQ(columns(DType::kI4, 128, 768), 128);
  EXPECT_EQ(columns(DType::kI4, 512, 768), 512);
  EXPECT_EQ(columns(DType::kI4, 96, 768), 32);
  EXPECT_EQ(columns(DType::kI4, 384, 768), 128);
  EXPECT_EQ(columns(DType::kI8, 384, 768), 384);
  EXPECT_EQ(columns(DType::kI4, 128, 768, 48), 16);
  EXPECT_EQ(columns(DType::kI4, 2880, 2880), 0);
  EXPECT_EQ(columns(DType::kI4, 2880, 1440, 1440), 0);
  EXPECT_EQ(down_factor_columns(problem(DType::kI8, {.weights = WeightScale::kChannel})), 0);
}

// Orders may make groups narrower than the file's, and rows of gate and up wider.
TEST(StreamPlan, OrdersOfColumns_SayWhatSharesFactors) {
  QuantSpec quant{.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 128};
  quant.has_column_order = true;
  ExpertsProblem sizes = problem(DType::kI4, quant);
  sizes.hidden_size = 100;
  EXPECT_EQ(sizes.input_columns(), 100);
  EXPECT_EQ(gate_up_factor_columns(sizes), 0);
  sizes.ordered = {.gate_up_group = 128, .down_group = 16, .gate_up = 228, .up_begin = 128};
  EXPECT_EQ(sizes.input_columns(), 228);
  EXPECT_EQ(gate_up_factor_columns(sizes), 128);
  EXPECT_EQ(down_factor_columns(sizes), 16);
  EXPECT_EQ(reason_of(stream_codes_supports(sizes)), "");
  EXPECT_EQ(code_kernel_form(sizes).columns_of_sum, 16);
}

// No kernel of codes as they are stored multiplies columns of rows.
TEST(StreamPlan, FactorsOfColumns_AreForKernelsOfCodesOnly) {
  QuantSpec quant = kBlockQuant;
  quant.has_column_factors = true;
  EXPECT_NE(reason_of(stream_fp8_supports(problem(DType::kF8E4M3, quant))).find("factors"),
            std::string::npos);
  quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 128};
  EXPECT_EQ(row_terms(problem(DType::kI4, quant)), 1);
  quant.has_column_factors = true;
  EXPECT_EQ(reason_of(stream_codes_supports(problem(DType::kI4, quant))), "");
  EXPECT_EQ(row_terms(problem(DType::kI4, quant)), 2);
  quant.activations = ActivationScale::kTensorStatic;
  EXPECT_EQ(row_terms(problem(DType::kF8E4M3, quant)), 1);
}

// Codes of whole numbers in their order have kernels without a table, and longer sums where factors
// are those of many columns.
TEST(StreamPlan, CodesInOrder_HaveKernelsOfTheirOwn) {
  const auto form = [](DType dtype, int64_t group, WeightZero zeros = WeightZero::kNone) {
    ExpertsProblem sizes = problem(
        dtype,
        {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = group, .zeros = zeros});
    sizes.intermediate_size = 512;
    return code_kernel_form(sizes);
  };
  EXPECT_EQ(form(DType::kI4, 128),
            (CodeKernelForm{.bits = 4, .columns_of_sum = 128, .in_order = true}));
  EXPECT_EQ(form(DType::kU4, 512, WeightZero::kPoint), form(DType::kI4, 128));
  EXPECT_EQ(form(DType::kI4, 64), (CodeKernelForm{.bits = 4, .in_order = true}));
  EXPECT_EQ(form(DType::kI4, 32, WeightZero::kPoint), form(DType::kI4, 64));
  EXPECT_EQ(form(DType::kI4, 16), (CodeKernelForm{.bits = 4, .columns_of_sum = 16}));
  EXPECT_EQ(form(DType::kI4, 128, WeightZero::kOffset),
            (CodeKernelForm{.bits = 4, .offsets = true, .in_order = true}));
  EXPECT_EQ(form(DType::kU4, 16, WeightZero::kOffset),
            (CodeKernelForm{.bits = 4, .columns_of_sum = 16, .offsets = true}));
  EXPECT_EQ(form(DType::kI8, 128), (CodeKernelForm{.bits = 8, .in_order = true}));
  // Slices of a rank may cut what a group shares.
  ExpertsProblem sizes =
      problem(DType::kI4, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 128});
  sizes.intermediate_size = 512;
  sizes.skipped_columns = 64;
  EXPECT_EQ(code_kernel_form(sizes), (CodeKernelForm{.bits = 4, .in_order = true}));
  EXPECT_EQ(code_kernel_form(problem(DType::kI4, {.weights = WeightScale::kChannel})),
            (CodeKernelForm{.bits = 4, .columns_of_sum = 128, .in_order = true}));
}

// Codes of 2 bits have half as many bytes of K, and tiles that have room for them.
TEST(StreamPlan, CodesOfTwoBits_HaveKernelsOfTheirOwn) {
  QuantSpec quant{.weights = WeightScale::kBlock,
                  .block_rows = 1,
                  .block_cols = 16,
                  .scale_values = ScaleValues::kSteps,
                  .zeros = WeightZero::kOffset,
                  .zero_values = ScaleValues::kSteps};
  ExpertsProblem sizes = problem(DType::kI4, quant);
  sizes.intermediate_size = 512;
  const CodeKernelForm wide = code_kernel_form(sizes);
  EXPECT_EQ(wide.bits, 4);
  sizes.quant.gate_up_codes.dtype = sizes.quant.down_codes.dtype = DType::kU2;
  EXPECT_EQ(code_kernel_form(sizes), kSmallCodesForm);
  EXPECT_TRUE(multiplies_steps(kSmallCodesForm));
  const auto tiles = stream_codes_tiles(sizes);
  ASSERT_EQ(tiles.size(), 3U);
  for (const DeviceTile& tile : tiles) {
    SCOPED_TRACE(to_string(tile));
    EXPECT_EQ(tile.depth, 64);
    EXPECT_GT(tile.stages, code_stages(wide, tile.tokens, tile.features));
    // Codes, a byte and a unit of 4 bytes; rows, and three numbers for each group.
    EXPECT_LE(tile.stages * (tile.features * (64 + 16 + 4) + tile.tokens * (512 + 96)), 217 << 10);
  }
  for (const DeviceTile& tile : tile_codes_tiles(sizes)) EXPECT_EQ(tile.depth, 64);
}

// So have bytes of whole numbers with offsets of 32 columns or more, in all tiles.
TEST(StreamPlan, BytesWithOffsets_HaveKernelsOfTheirOwn) {
  const auto sizes_of = [](DType dtype, const QuantSpec& quant) {
    ExpertsProblem sizes = problem(dtype, quant);
    sizes.intermediate_size = 512;
    return sizes;
  };
  const auto groups = [](int64_t columns, WeightZero zeros) {
    return QuantSpec{
        .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
  };
  constexpr CodeKernelForm kBytes{.bits = 8, .offsets = true, .in_order = true};
  for (const int64_t columns : {32, 64, 128, 256}) {
    const ExpertsProblem sizes = sizes_of(DType::kI8, groups(columns, WeightZero::kOffset));
    EXPECT_EQ(code_kernel_form(sizes), kBytes) << columns;
    EXPECT_EQ(stream_codes_tiles(sizes).size(), 6U);
  }
  EXPECT_EQ(code_kernel_form(sizes_of(
                DType::kI8, {.weights = WeightScale::kChannel, .zeros = WeightZero::kOffset})),
            kBytes);
  EXPECT_EQ(code_kernel_form(sizes_of(DType::kI8, groups(16, WeightZero::kOffset))),
            (CodeKernelForm{.bits = 8, .columns_of_sum = 16, .offsets = true}));
  EXPECT_EQ(code_kernel_form(sizes_of(DType::kI8, groups(32, WeightZero::kPoint))),
            (CodeKernelForm{.bits = 8, .in_order = true}));
  // These kernels take the numbers of bytes in the complement of two.
  for (const quant::WeightFormat& format : quant::format_catalog().rows()) {
    if (format.codes == nullptr || !format.codes->whole.fit || bit_size(format.element) != 8) {
      continue;
    }
    for (int code = 0; code < 256; ++code) {
      EXPECT_EQ(format.codes->decode(static_cast<uint8_t>(code)), static_cast<int8_t>(code));
    }
  }
  // Floats keep a table.
  EXPECT_EQ(code_kernel_form(sizes_of(DType::kF8E4M3, groups(32, WeightZero::kPoint))),
            (CodeKernelForm{.bits = 8, .offsets = true}));
}

// Other codes of 4 bits are looked up in pairs, in sums of up to 64 columns.
TEST(StreamPlan, CodesOfOtherValues_AreLookedUpInPairs) {
  const auto form = [](DType dtype, const QuantSpec& quant) {
    ExpertsProblem sizes = problem(dtype, quant);
    sizes.intermediate_size = 512;
    return code_kernel_form(sizes);
  };
  const auto groups = [](int64_t columns, WeightZero zeros = WeightZero::kNone) {
    return QuantSpec{
        .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
  };
  constexpr CodeKernelForm kWide{.bits = 4, .columns_of_sum = 64, .in_pairs = true};
  constexpr CodeKernelForm kNarrow{.bits = 4, .in_pairs = true};
  for (const DType dtype : {DType::kBnbFP4, DType::kIQ4, DType::kF4}) {
    EXPECT_EQ(form(dtype, groups(64)), kWide);
    EXPECT_EQ(form(dtype, groups(128)), kWide);
    EXPECT_EQ(form(dtype, {.weights = WeightScale::kChannel}), kWide);
    EXPECT_EQ(form(dtype, groups(32)), kNarrow);
    EXPECT_EQ(form(dtype, groups(96)), kNarrow);
    EXPECT_EQ(form(dtype, groups(16)), (CodeKernelForm{.bits = 4, .columns_of_sum = 16}));
  }
  EXPECT_EQ(form(DType::kIQ4, groups(64, WeightZero::kPoint)), CodeKernelForm{.bits = 4});
}

// Values of two terms lie in pairs where sums are those of 64 columns, and else as stored.
TEST(StreamPlan, CodesOfTwoTerms_AreInPairsWhereSumsAreLong) {
  const auto form = [](int64_t columns) {
    ExpertsProblem sizes = problem(
        DType::kNF4, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns});
    sizes.intermediate_size = 512;
    return code_kernel_form(sizes);
  };
  constexpr CodeKernelForm kPairs{
      .bits = 4, .columns_of_sum = 64, .two_terms = true, .in_pairs = true};
  EXPECT_EQ(form(64), kPairs);
  EXPECT_EQ(form(4096), kPairs);
  EXPECT_EQ(form(32), (CodeKernelForm{.bits = 4, .two_terms = true}));
  EXPECT_EQ(form(16), (CodeKernelForm{.bits = 4, .columns_of_sum = 16, .two_terms = true}));
}

void expect_tiles_fit(std::span<const DeviceTile> tiles, int32_t least_stages = 3) {
  constexpr int64_t kSharedBytes = int64_t{227} << 10;
  ASSERT_FALSE(tiles.empty());
  for (size_t i = 0; i < tiles.size(); ++i) {
    const DeviceTile& tile = tiles[i];
    SCOPED_TRACE(std::to_string(tile.tokens) + " tokens, " + std::to_string(tile.features));
    EXPECT_LT(int64_t{tile.tokens + tile.features} * tile.depth * tile.stages, kSharedBytes);
    EXPECT_EQ(tile.tokens % 16, 0);
    EXPECT_EQ(tile.features % 128, 0);
    EXPECT_EQ(tile.depth % 128, 0);
    EXPECT_GE(tile.stages, least_stages);
    EXPECT_EQ(std::count(tiles.begin(), tiles.end(), tile), 1);
    EXPECT_GE(tile.tokens, i > 0 ? tiles[i - 1].tokens : 0) << "fewest rows first";
  }
}

TEST(StreamPlan, Tiles_FitIntoSharedMemory) {
  expect_tiles_fit(stream_sm90_tiles(problem(DType::kBF16)));
  expect_tiles_fit(stream_bytes_tiles(problem(DType::kF8E4M3, kBlockQuant)));
  // A stage of codes has as many columns as several of values.
  for (const DType dtype : {DType::kI4, DType::kI8}) {
    expect_tiles_fit(stream_codes_tiles(problem(dtype, {.weights = WeightScale::kChannel})), 2);
    expect_tiles_fit(
        stream_codes_tiles(
            problem(dtype, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32})),
        2);
  }
}

// Mixtral's 8 experts have 176 items of 192 weight rows, two turns of 132 multiprocessors, and 256
// of 128; the items of 128 experts fill the device with either.
TEST(StreamPlan, DownProductOfFewExperts_HasItemsThatEndTogether) {
  ExpertsProblem sizes =
      problem(DType::kI4, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 128});
  sizes.hidden_size = 4096;
  sizes.intermediate_size = 14336;
  std::get<cuda::DeviceInfo>(sizes.target).multiprocessors = 132;
  const std::span<const DeviceTile> tiles = tile_codes_tiles(sizes);
  ASSERT_EQ(tiles.size(), 2U);
  EXPECT_EQ(tile_codes_down_tile(sizes, tiles.front()), tiles.back());
  EXPECT_EQ(tile_codes_down_tile(sizes, tiles.back()), tiles.back());
  sizes.num_local_experts = 128;
  EXPECT_EQ(tile_codes_down_tile(sizes, tiles.front()), tiles.front());
}

TEST(StreamPlan, WorkspaceOfE4m3_PartsHoldTheirRows) {
  for (const QuantSpec& quant : {kBlockQuant, kChannelQuant}) {
    for (const int64_t width : {1, 15, 128, 129, 200}) {
      for (const int64_t rows : {0, 1, 17, 4096}) {
        SCOPED_TRACE("I=" + std::to_string(width) + " rows=" + std::to_string(rows));
        ExpertsProblem sizes = problem(DType::kF8E4M3, quant);
        sizes.intermediate_size = width;
        const StreamBytesWorkspace layout = stream_bytes_workspace(sizes, rows);
        const bool grouped = quant.activations == ActivationScale::kGroup;
        const int64_t scales = grouped ? (width + 127) / 128 : 1;
        EXPECT_EQ(layout.stride % 16, 0);
        EXPECT_GE(layout.stride, width);
        for (const size_t at : {layout.codes, layout.scales, layout.values}) {
          EXPECT_EQ(at % 256, 0);
        }
        EXPECT_GE(layout.codes, static_cast<size_t>(stream::kCounterBytes));
        EXPECT_GE(layout.scales - layout.codes, static_cast<size_t>(rows * layout.stride));
        EXPECT_GE(layout.values - layout.scales, static_cast<size_t>(rows * scales) * 4);
        const auto values = grouped ? 0 : static_cast<size_t>(rows * layout.stride) * 4;
        EXPECT_EQ(layout.bytes - layout.values, values);
      }
    }
  }
}

TEST(StreamPlan, WorkspacesOfPlainRowsAndCodes_BeginWithCounters) {
  const ExpertsProblem plain = problem(DType::kBF16);
  const int64_t row_bytes = stream_sm90_stride(plain) * 2;
  EXPECT_EQ(stream_sm90_bytes(plain, 5),
            static_cast<size_t>(stream::kCounterBytes + 5 * plain.top_k * row_bytes));
  const ExpertsProblem coded =
      problem(DType::kI4, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32});
  const StreamCodesWorkspace layout = stream_codes_workspace(coded, 10);
  EXPECT_EQ(layout.rows, static_cast<size_t>(stream::kCounterBytes));
  EXPECT_GE(layout.bytes, layout.rows + static_cast<size_t>(10 * layout.stride * 2));
}

// Offsets exceed 2^31: there are as many rows as 16384 tokens with 8 experts make in the widest
// models.
TEST(StreamPlan, WorkspaceOfE4m3_CountsInSixtyFourBits) {
  ExpertsProblem sizes = problem(DType::kF8E4M3, kChannelQuant);
  sizes.intermediate_size = 28672;
  const int64_t rows = 131072;
  EXPECT_GE(stream_bytes_workspace(sizes, rows).bytes, static_cast<size_t>(rows * 28672 * 5));
}

}  // namespace
}  // namespace conclave::experts
