// Compares the ladder's cost model with measurements on an H200: in each case the row named here
// was the fastest, or within 3 % of it.
#include "experts/cuda/tile_choice.h"

#include "experts/catalog.h"
#include "experts/cuda/sm90/tile_bytes/tile_bytes.h"
#include "support/cuda/cuda_problem.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::experts {
namespace {

struct Sizes {
  std::string_view name;
  int64_t experts, top_k, hidden, intermediate;
};
constexpr Sizes kQwen30 = {"qwen3-30b", 128, 8, 2048, 768};
constexpr Sizes kQwen235 = {"qwen3-235b", 128, 8, 4096, 1536};
constexpr Sizes kMixtral = {"mixtral-8x7b", 8, 2, 4096, 14336};
constexpr Sizes kOlmoe = {"olmoe", 64, 8, 2048, 1024};
constexpr Sizes kGptOss = {"gpt-oss-20b", 32, 4, 2880, 2880};
constexpr Sizes kDeepseek = {"deepseek-v3", 256, 8, 7168, 2048};
constexpr Sizes kShard = {"deepseek-v3 shard", 32, 1, 7168, 2048};

ExpertsProblem problem_of(const Sizes& sizes, DType dtype) {
  ExpertsProblem problem{.num_local_experts = sizes.experts,
                         .hidden_size = sizes.hidden,
                         .intermediate_size = sizes.intermediate,
                         .top_k = sizes.top_k,
                         .max_tokens = 16384,
                         .weight_dtype = dtype};
  if (dtype == DType::kF8E4M3) problem.quant = testing::fp8_block_quant();
  problem.target = cuda::DeviceInfo{.name = "NVIDIA H200",
                                    .capability = {9, 0},
                                    .multiprocessors = 132,
                                    .l2_bytes = int64_t{60} << 20,
                                    .memory_bytes = int64_t{141} << 30,
                                    .shared_bytes_per_block = int64_t{227} << 10};
  return problem;
}

TileChoice choice_for(const ExpertsProblem& problem, int64_t tokens) {
  std::vector<const DeviceKernelRow*> rows;
  for (const DeviceKernelRow& row : device_kernels().rows()) {
    if (row.name != "cuda.reference" && row.supports(problem)) rows.push_back(&row);
  }
  return choose_tile(problem, rows, tokens);
}

struct Measured {
  Sizes sizes;
  DType dtype;
  int64_t tokens;
  std::string_view row;
  int32_t most_tokens;  // in the tile: wider ones were slower
};
constexpr std::array kMeasured = {
    Measured{kQwen30, DType::kBF16, 16, "cuda.stream_sm90", 96},
    Measured{kQwen30, DType::kBF16, 256, "cuda.stream_sm90", 96},
    Measured{kQwen30, DType::kBF16, 2048, "cuda.tile_sm90", 128},
    Measured{kQwen30, DType::kBF16, 16384, "cuda.tile_sm90", 128},
    Measured{kQwen235, DType::kBF16, 512, "cuda.stream_sm90", 96},
    Measured{kQwen235, DType::kBF16, 1024, "cuda.stream_sm90", 96},
    Measured{kQwen235, DType::kBF16, 2048, "cuda.stream_sm90", 160},
    Measured{kQwen235, DType::kBF16, 4096, "cuda.tile_sm90", 128},
    Measured{kMixtral, DType::kBF16, 64, "cuda.stream_sm90", 96},
    Measured{kMixtral, DType::kBF16, 1024, "cuda.stream_sm90", 160},
    Measured{kMixtral, DType::kF16, 16384, "cuda.tile_sm90", 128},
    Measured{kOlmoe, DType::kBF16, 256, "cuda.stream_sm90", 96},
    Measured{kOlmoe, DType::kBF16, 1024, "cuda.tile_sm90", 128},
    Measured{kGptOss, DType::kBF16, 256, "cuda.stream_sm90", 96},
    Measured{kGptOss, DType::kBF16, 1024, "cuda.stream_sm90", 160},
    Measured{kGptOss, DType::kBF16, 2048, "cuda.stream_sm90", 160},
    Measured{kGptOss, DType::kBF16, 4096, "cuda.tile_sm90", 128},
    Measured{kDeepseek, DType::kBF16, 1024, "cuda.stream_sm90", 96},
    Measured{kDeepseek, DType::kBF16, 4096, "cuda.stream_sm90", 160},
    Measured{kDeepseek, DType::kBF16, 16384, "cuda.tile_sm90", 128},
    Measured{kQwen30, DType::kF8E4M3, 64, "cuda.stream_fp8_sm90", 64},
    Measured{kQwen30, DType::kF8E4M3, 1024, "cuda.tile_fp8_sm90", 256},
    Measured{kQwen235, DType::kF8E4M3, 256, "cuda.stream_fp8_sm90", 96},
    Measured{kQwen235, DType::kF8E4M3, 1024, "cuda.tile_fp8_sm90", 256},
    Measured{kShard, DType::kF8E4M3, 512, "cuda.stream_fp8_sm90", 96},
    Measured{kShard, DType::kF8E4M3, 2048, "cuda.tile_fp8_sm90", 256},
};

TEST(TileChoice, MeasuredCases_GetTheRowThatWasFastest) {
  for (const Measured& measured : kMeasured) {
    SCOPED_TRACE(std::string(measured.sizes.name) + " T=" + std::to_string(measured.tokens));
    const TileChoice choice =
        choice_for(problem_of(measured.sizes, measured.dtype), measured.tokens);
    ASSERT_NE(choice.row, nullptr);
    EXPECT_EQ(choice.row->name, measured.row) << to_string(choice.tile);
    EXPECT_LE(choice.tile.tokens, measured.most_tokens);
  }
}

// Tiles of 256 weight rows are faster where their items end together as well as those of 128 do.
TEST(TileChoice, WideTiles_AreForItemsThatFillTheDevice) {
  const auto features = [](const Sizes& sizes, int64_t tokens) {
    ExpertsProblem problem = problem_of(sizes, DType::kI4);
    problem.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 128};
    return choice_for(problem, tokens).tile.features;
  };
  EXPECT_EQ(features(kMixtral, 64), 256);
  EXPECT_EQ(features(kQwen235, 16), 256);
  EXPECT_EQ(features(kMixtral, 16), 256);
  // 48 items of 256 rows would leave most multiprocessors idle.
  EXPECT_EQ(features(kQwen30, 1), 128);
}

// A copy costs three passes over each row's elements and saves a share of its products. Only sorted
// rows come in pairs of blocks, which read the weights from L2 once.
TEST(TileChoice, RowsAreSortedForPairs_WhereProductsAreLong) {
  for (const int64_t tokens : {4096, 16384}) {
    for (const Sizes& sizes : {kMixtral, kQwen235, kGptOss}) {
      const DeviceTile tile = choice_for(problem_of(sizes, DType::kBF16), tokens).tile;
      EXPECT_TRUE(tile.sorted_input && tile.cluster == 2) << sizes.name << ' ' << tokens;
    }
    for (const Sizes& sizes : {kQwen30, kOlmoe}) {
      const DeviceTile tile = choice_for(problem_of(sizes, DType::kBF16), tokens).tile;
      EXPECT_TRUE(!tile.sorted_input && tile.cluster == 1) << sizes.name << ' ' << tokens;
    }
  }
  const DeviceTile deepseek = choice_for(problem_of(kDeepseek, DType::kBF16), 16384).tile;
  EXPECT_TRUE(deepseek.sorted_input && deepseek.cluster == 2);
  const Sizes shared{"shared expert", 1, 1, 2048, 512};
  EXPECT_TRUE(choice_for(problem_of(shared, DType::kBF16), 4096).tile.sorted_input);
}

TEST(TileChoice, MoreTokens_NeverTakeLess) {
  const ExpertsProblem problem = problem_of(kQwen30, DType::kBF16);
  double before = 0;
  for (int64_t tokens = 1; tokens <= 16384; tokens *= 2) {
    const double now = choice_for(problem, tokens).microseconds;
    EXPECT_GE(now, before) << tokens << " tokens";
    before = now;
  }
}

TEST(DeviceRates, H200AndH100_AreKnownByName_OthersByTheirClocks) {
  const cuda::DeviceClocks h200_clocks{.multiprocessors = 132,
                                       .core_khz = 1'830'000,
                                       .memory_khz = 3'201'000,
                                       .memory_bus_bits = 6144};
  const cuda::DeviceRates listed = cuda::device_rates("NVIDIA H200", cuda::kHopper, {});
  EXPECT_EQ(listed.memory_terabytes, 4.8);
  EXPECT_EQ(listed.cache_terabytes, 5.5);
  EXPECT_LT(
      cuda::device_rates("NVIDIA H100 80GB HBM3", cuda::kHopper, h200_clocks).memory_terabytes,
      3.4);
  EXPECT_LT(cuda::device_rates("NVIDIA H100 PCIe", cuda::kHopper, h200_clocks).tensor16_teraflops,
            800);
  // The clocks of an H200 give its rates, whatever it is called.
  const cuda::DeviceRates clocked = cuda::device_rates("some Hopper", cuda::kHopper, h200_clocks);
  EXPECT_NEAR(clocked.tensor16_teraflops / listed.tensor16_teraflops, 1, 0.02);
  EXPECT_NEAR(clocked.float32_teraflops / listed.float32_teraflops, 1, 0.1);
  EXPECT_NEAR(clocked.memory_terabytes / listed.memory_terabytes, 1, 0.05);
  EXPECT_EQ(cuda::device_rates("silent", {12, 1}, {}).memory_terabytes, listed.memory_terabytes);
}

// What was fastest on an H100 (bench/results/h200/2026-11-25-h100-tuning-check.md): its L2 gives
// weights that a second tile reads again at hardly more than the rate of its memory, so that tiles
// hold nearly all rows of an expert.
TEST(DeviceRates, H100_TakesTilesThatReadWeightsOnce) {
  struct Fastest {
    Sizes sizes;
    DType dtype;
    int64_t tokens;
    int32_t least_tile;
  };
  for (const Fastest& fastest :
       {Fastest{kQwen235, DType::kBF16, 256, 32}, Fastest{kQwen235, DType::kBF16, 512, 64},
        Fastest{kQwen235, DType::kBF16, 1024, 96}, Fastest{kQwen30, DType::kBF16, 256, 32},
        Fastest{kQwen30, DType::kBF16, 512, 64}, Fastest{kQwen30, DType::kBF16, 1024, 96},
        Fastest{kQwen30, DType::kF8E4M3, 512, 64}, Fastest{kQwen30, DType::kF8E4M3, 1024, 80}}) {
    ExpertsProblem problem = problem_of(fastest.sizes, fastest.dtype);
    std::get<cuda::DeviceInfo>(problem.target).rates =
        cuda::device_rates("NVIDIA H100 80GB HBM3", cuda::kHopper, {});
    const TileChoice choice = choice_for(problem, fastest.tokens);
    SCOPED_TRACE(std::string(fastest.sizes.name) + " T=" + std::to_string(fastest.tokens));
    EXPECT_TRUE(choice.row->name.starts_with("cuda.stream")) << choice.row->name;
    EXPECT_GE(choice.tile.tokens, fastest.least_tile);
  }
}

// A device whose memory is slower streams weights for longer, and nothing else changes.
TEST(DeviceRates, SlowerMemory_CostsStreamedWeights) {
  ExpertsProblem problem = problem_of(kMixtral, DType::kBF16);
  const double before = choice_for(problem, 16).microseconds;
  std::get<cuda::DeviceInfo>(problem.target).rates.memory_terabytes /= 2;
  EXPECT_GT(choice_for(problem, 16).microseconds, 1.7 * before);
}

// L2 holds no expert of mixtral-8x7b from one token tile to the next; rows of down are so long that
// eight tiles of them would not stay there either.
TEST(TileBytesGroup, WeightsBeyondL2_AreReadForSeveralTokenTiles) {
  constexpr int64_t kL2Bytes = int64_t{60} << 20;
  EXPECT_EQ(tile_bytes_group(112, kMixtral.hidden, kL2Bytes), 8);
  EXPECT_EQ(tile_bytes_group(16, kMixtral.intermediate, kL2Bytes), 4);
  EXPECT_EQ(tile_bytes_group(6, kQwen30.hidden, kL2Bytes), 1);
  EXPECT_EQ(tile_bytes_group(12, kQwen235.hidden, kL2Bytes), 1);
}

TEST(TileChoice, EdgeSizes_GetATile) {
  for (const Sizes& sizes : {Sizes{"one expert", 1, 1, 8, 8}, Sizes{"all of them", 6, 6, 200, 104},
                             Sizes{"more choices than experts", 2, 8, 64, 64}}) {
    for (const int64_t tokens : {1, 127, 128, 129, 16384}) {
      SCOPED_TRACE(std::string(sizes.name) + " T=" + std::to_string(tokens));
      const TileChoice choice = choice_for(problem_of(sizes, DType::kBF16), tokens);
      ASSERT_NE(choice.row, nullptr);
      EXPECT_GT(choice.microseconds, 0);
      EXPECT_LT(choice.microseconds, 1e9);
    }
  }
}

}  // namespace
}  // namespace conclave::experts
