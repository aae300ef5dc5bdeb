// Opening takes time in proportion to the number of tensors, whatever their names.
#include "checkpoint/shard_index.h"
#include "checkpoint/tiny_model.h"
#include "io/gguf_bytes.h"
#include "support/sanitizers.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

// Uses processor time, so that other tests on the machine do not count.
double call_ms(const std::function<void()>& call) {
  const std::clock_t start = std::clock();
  call();
  return 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

// The best times of a call and of the same on more. They take turns, so that a spell in which the
// machine is slow reaches both.
struct Growth {
  double small_ms = 1e30;
  double large_ms = 1e30;

  double ratio() const { return large_ms / small_ms; }
};

Growth best_times(int rounds, const std::function<void()>& small,
                  const std::function<void()>& large) {
  Growth best;
  for (int round = 0; round < rounds; ++round) {
    best.small_ms = std::min(best.small_ms, call_ms(small));
    best.large_ms = std::min(best.large_ms, call_ms(large));
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
  // The sanitizers' times grow alike with fewer.
  const int64_t tensors = CONCLAVE_TEST_ASAN ? 25'000 : 100'000;
  write_large_model(small, tensors);
  write_large_model(large, 2 * tensors);
  const Growth whole = best_times(
      3, [&] { Checkpoint::open(small.path()); }, [&] { Checkpoint::open(large.path()); });
  const auto open_shards = [](const TempDir& directory) {
    checkpoint::open_shards(io::Directory::open(directory.path()), FileAccess::kAuto);
  };
  const Growth index = best_times(
      3, [&] { open_shards(small); }, [&] { open_shards(large); });
  fmt::print(
      "index and headers of {} tensors {:.0f} ms, of twice as many {:.0f} ms, ratio {:.2f}\n",
      tensors, index.small_ms, index.large_ms, index.ratio());
  fmt::print("whole open of {} tensors {:.0f} ms, of twice as many {:.0f} ms, ratio {:.2f}\n",
             tensors, whole.small_ms, whole.large_ms, whole.ratio());
  // The bar is 2.3, but caches may add to it; a quadratic step anywhere would give 4.
  EXPECT_LE(whole.ratio(), 3.0);
  EXPECT_LE(index.ratio(), 3.0);
}

// Writes a GGUF model of so many layers, each with five tensors.
void write_layered_gguf(const std::filesystem::path& path, uint32_t layers) {
  GgufParts parts;
  parts.entries = {gguf_entry("general.architecture", kGgufText, gguf_text("qwen3moe")),
                   gguf_entry("qwen3moe.block_count", kGgufU32, layers),
                   gguf_entry("qwen3moe.embedding_length", kGgufU32, uint32_t{8}),
                   gguf_entry("qwen3moe.expert_count", kGgufU32, uint32_t{2}),
                   gguf_entry("qwen3moe.expert_used_count", kGgufU32, uint32_t{1})};
  const auto add = [&](uint32_t layer, const char* name, const std::vector<uint64_t>& dims) {
    const std::string full = fmt::format("blk.{}.{}", layer, name);
    parts.tensors.push_back(gguf_tensor(full, dims, kTypeF32, parts.data_bytes));
    uint64_t elements = 1;
    for (const uint64_t size : dims) elements *= size;
    parts.data_bytes += (elements * sizeof(float) + 31) / 32 * 32;
  };
  for (uint32_t layer = 0; layer < layers; ++layer) {
    add(layer, "ffn_gate_inp.weight", {8, 2});
    for (const char* name : {"ffn_gate_exps.weight", "ffn_up_exps.weight"}) {
      add(layer, name, {8, 4, 2});
    }
    add(layer, "ffn_down_exps.weight", {4, 8, 2});
    add(layer, "attn_norm.weight", {8});
  }
  write_text(path, gguf(parts));
}

TEST(Complexity, GgufFilesOfManyLayers_AreLinear) {
  const TempDir directory;
  write_layered_gguf(directory / "small.gguf", 1024);
  write_layered_gguf(directory / "large.gguf", 4096);
  const Growth open = best_times(
      10, [&] { Checkpoint::open(directory / "small.gguf"); },
      [&] { Checkpoint::open(directory / "large.gguf"); });
  std::printf("GGUF: 1024 layers %.1f ms, 4096 %.1f ms, ratio %.2f\n", open.small_ms, open.large_ms,
              open.ratio());
  // Much of so little work goes to fresh pages, which only the large file needs; a quadratic step
  // would give 16.
  EXPECT_LE(open.ratio(), 8.0);
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
  const double ms = call_ms([&] { error = open_error(directory.path()); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTensorMissing);
  EXPECT_LT(ms, 5000.0);
  EXPECT_LT(std::string(error->what()).size(), 4000U);
}

}  // namespace
}  // namespace conclave::testing
