// Opening takes time in proportion to the number of tensors, whatever their names.
#include "checkpoint/shard_index.h"
#include "checkpoint/tiny_model.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

// Uses processor time, so that other tests on the machine do not count.
double best_ms(const std::function<void()>& call) {
  double best = 1e30;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const std::clock_t start = std::clock();
    call();
    best = std::min(best, 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  return best;
}

// Writes a sharded model of about `tensors` expert tensors with one element each.
void write_large_model(const TempDir& directory, int64_t tensors) {
  constexpr int64_t kExperts = 128;
  const int64_t layers = tensors / (3 * kExperts);
  const nlohmann::json config = {{"model_type", "qwen3_moe"},  {"hidden_size", 1},
                                 {"moe_intermediate_size", 1}, {"num_hidden_layers", layers},
                                 {"num_experts", kExperts},    {"num_experts_per_tok", 8}};
  write_text(directory / "config.json", config.dump());
  constexpr size_t kShards = 4;
  std::string lines;
  for (size_t shard = 0; shard < kShards; ++shard) {
    SafetensorsWriter writer(directory / shard_name(shard, kShards));
    size_t bytes = 0;
    const auto declare = [&](const std::string& name, std::vector<int64_t> shape) {
      bytes += static_cast<size_t>(shape[0]) * 2;
      lines += fmt::format("{}\n\"{}\": \"{}\"", lines.empty() ? "" : ",", name,
                           shard_name(shard, kShards));
      writer.declare(name, DType::kBF16, std::move(shape));
    };
    for (auto layer = static_cast<int64_t>(shard); layer < layers; layer += kShards) {
      const std::string prefix = fmt::format("model.layers.{}.mlp.", layer);
      declare(prefix + "gate.weight", {kExperts, 1});
      for (int64_t expert = 0; expert < kExperts; ++expert) {
        for (const char* matrix : {"gate_proj", "up_proj", "down_proj"}) {
          declare(fmt::format("{}experts.{}.{}.weight", prefix, expert, matrix), {1, 1});
        }
      }
    }
    writer.write(std::vector<std::byte>(bytes));
    writer.finish();
  }
  write_text(directory / "model.safetensors.index.json", "{\"weight_map\": {" + lines + "}}");
}

TEST(Complexity, OpeningManyTensors_IsLinear) {
  const TempDir small;
  const TempDir large;
  write_large_model(small, 100'000);
  write_large_model(large, 200'000);
  const double small_ms = best_ms([&] { Checkpoint::open(small.path()); });
  const double large_ms = best_ms([&] { Checkpoint::open(large.path()); });
  const auto shards_ms = [](const TempDir& directory) {
    return best_ms(
        [&] { checkpoint::open_shards(io::Directory::open(directory.path()), FileAccess::kAuto); });
  };
  const double small_index_ms = shards_ms(small);
  const double large_index_ms = shards_ms(large);
  std::printf("index and headers: 100k tensors %.0f ms, 200k %.0f ms, ratio %.2f\n", small_index_ms,
              large_index_ms, large_index_ms / small_index_ms);
  std::printf("whole open:        100k tensors %.0f ms, 200k %.0f ms, ratio %.2f\n", small_ms,
              large_ms, large_ms / small_ms);
  // The bar is 2.3, but caches may add to it; a quadratic step anywhere would give 4.
  EXPECT_LE(large_ms / small_ms, 3.0);
  EXPECT_LE(large_index_ms / small_index_ms, 3.0);
}

TEST(Complexity, HostileSizesWithFewTensors_FailFast) {
  TinyModel model = make_tiny_model({});
  model.config["num_experts"] = 16384;
  model.config["num_hidden_layers"] = 4096;
  for (TinyTensor& tensor : model.tensors) {
    if (!tensor.name.ends_with("mlp.gate.weight")) continue;
    tensor.shape[0] = 16384;
    tensor.bytes.resize(16384 * 10 * 2);
  }
  const TempDir directory;
  write_single(model, directory.path());
  std::optional<Error> error;
  const double ms = best_ms([&] { error = open_error(directory.path()); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorMissing);
  EXPECT_LT(ms, 5000.0);
  EXPECT_LT(std::string(error->what()).size(), 4000U);
}

}  // namespace
}  // namespace conclave::testing
