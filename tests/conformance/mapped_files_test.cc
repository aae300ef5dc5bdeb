// Tests layers that read experts in mapped GGUF and safetensors files: bits, splits, alignments,
// and how much memory a process has beside the file. Each measurement is a process of its own.

#include "support/layer_fixture.h"
#include "support/sanitizers.h"

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"
#include "conclave/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <sys/wait.h>
#include <tuple>
#include <unistd.h>
#include <vector>

namespace conclave {
namespace {

using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

struct Sizes {
  int64_t experts = 5;
  int64_t hidden = 84;
  int64_t inner = 45;
};

std::filesystem::path fresh_directory(const std::string& name) {
  const auto path = std::filesystem::path(::testing::TempDir()) /
                    fmt::format("conclave-mapped-{}-{}", name, getpid());
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

struct NamedShape {
  std::string name;
  std::string_view type;
  std::vector<int64_t> shape;
};

std::vector<NamedShape> gguf_tensors(std::string_view type, const Sizes& sizes) {
  const auto [e, h, i] = sizes;
  return {{"blk.0.ffn_gate_inp.weight", "F32", {e, h}},
          {"blk.0.ffn_gate_exps.weight", type, {e, i, h}},
          {"blk.0.ffn_up_exps.weight", type, {e, i, h}},
          {"blk.0.ffn_down_exps.weight", type, {e, h, i}}};
}

std::vector<GgufKey> gguf_keys(const Sizes& sizes, uint64_t alignment) {
  const auto u32 = [](const char* name, int64_t value) {
    return GgufKey::of_u32(name, static_cast<uint32_t>(value));
  };
  return {GgufKey::of_text("general.architecture", "qwen3moe"),
          u32("general.alignment", static_cast<int64_t>(alignment)),
          u32("qwen3moe.block_count", 1),
          u32("qwen3moe.embedding_length", sizes.hidden),
          u32("qwen3moe.expert_feed_forward_length", sizes.inner),
          u32("qwen3moe.expert_count", sizes.experts),
          u32("qwen3moe.expert_used_count", 2)};
}

void write_tensor(GgufWriter& writer, const NamedShape& tensor, uint64_t seed) {
  const DType dtype = tensor.type == "F32"   ? DType::kF32
                      : tensor.type == "F16" ? DType::kF16
                                             : DType::kBF16;
  Tensor values(dtype, Shape(tensor.shape));
  const int64_t cols = tensor.shape.back();
  fill_random({.data = values.as<std::byte>(),
               .dtype = dtype,
               .shape = {values.shape().num_elements() / cols, cols}},
              seed);
  writer.write({values.as<std::byte>(), values.size_bytes()});
}

// One file, or as many parts as it has tensors.
std::filesystem::path write_gguf(const std::filesystem::path& directory, std::string_view type,
                                 const Sizes& sizes, uint64_t alignment, bool split) {
  const std::vector<NamedShape> tensors = gguf_tensors(type, sizes);
  const size_t parts = split ? tensors.size() : 1;
  for (size_t part = 0; part < parts; ++part) {
    std::vector<GgufKey> keys =
        part == 0 ? gguf_keys(sizes, alignment)
                  : std::vector{GgufKey::of_u32("general.alignment", uint32_t(alignment))};
    if (split) {
      keys.push_back(GgufKey::of_u16("split.no", static_cast<uint16_t>(part)));
      keys.push_back(GgufKey::of_u16("split.count", static_cast<uint16_t>(parts)));
      keys.push_back(GgufKey::of_i32("split.tensors.count", static_cast<int32_t>(tensors.size())));
    }
    const std::string name =
        split ? fmt::format("m-{:05}-of-{:05}.gguf", part + 1, parts) : "m.gguf";
    GgufWriter writer(directory / name, keys, alignment);
    const size_t begin = split ? part : 0;
    const size_t end = split ? part + 1 : tensors.size();
    for (size_t i = begin; i < end; ++i) {
      writer.declare(tensors[i].name, tensors[i].type, tensors[i].shape);
    }
    for (size_t i = begin; i < end; ++i) write_tensor(writer, tensors[i], 17 + i);
    writer.finish();
  }
  return directory / (split ? fmt::format("m-00001-of-{:05}.gguf", parts) : "m.gguf");
}

MoeLayer make_mapped(const Context& context, const Checkpoint& checkpoint,
                     const WeightSource& source, WeightUse use, const ParallelSpec& parallel = {}) {
  return MoeLayer::create(context, checkpoint.layer(0).spec, source,
                          {.max_tokens = 32, .weights = use}, parallel);
}

class MappedGguf : public ::testing::TestWithParam<std::tuple<std::string, uint64_t, bool>> {};

TEST_P(MappedGguf, Layers_HaveTheBitsOfThoseThatPack) {
  const auto& [type, alignment, split] = GetParam();
  const Sizes sizes;
  const auto directory = fresh_directory("bits");
  const auto path = write_gguf(directory, type, sizes, alignment, split);
  const Checkpoint read = Checkpoint::open(path);
  const Checkpoint mapped = Checkpoint::open(path, {.access = FileAccess::kMap});
  const auto read_source = read.layer_source(0);
  const auto mapped_source = mapped.layer_source(0);
  const Context context({.num_threads = 2});
  const Tensor hidden = random_tensor(DType::kF32, 11, sizes.hidden, 5);
  for (int32_t rank = 0; rank < 4; ++rank) {
    const ParallelSpec parallel{.ep_size = 2,
                                .ep_rank = rank / 2,
                                .tp_size = 2,
                                .tp_rank = rank % 2,
                                .reduce = Reduce::kPartial};
    const MoeLayer packed = make_mapped(context, read, *read_source, WeightUse::kPacked, parallel);
    const MoeLayer in_place =
        make_mapped(context, mapped, *mapped_source, WeightUse::kInPlace, parallel);
    // Sources that do not map have nothing in memory.
    EXPECT_GT(
        make_mapped(context, read, *read_source, WeightUse::kInPlace, parallel).plan().packed_bytes,
        0U);
    EXPECT_EQ(in_place.plan().packed_bytes, 0U);
    EXPECT_GT(in_place.plan().in_place_bytes, 0U);
    EXPECT_TRUE(same_bits(run_layer(packed, hidden.view(), DType::kF32).out,
                          run_layer(in_place, hidden.view(), DType::kF32).out))
        << "rank " << rank;
  }
  std::filesystem::remove_all(directory);
}

INSTANTIATE_TEST_SUITE_P(Files, MappedGguf,
                         ::testing::Combine(::testing::Values("F32", "F16", "BF16"),
                                            ::testing::Values(8, 32, 4096),
                                            ::testing::Values(false, true)),
                         [](const auto& row) {
                           return std::get<0>(row.param) + "_alignment" +
                                  std::to_string(std::get<1>(row.param)) +
                                  (std::get<2>(row.param) ? "_split" : "_single");
                         });

TEST(MappedGgufFiles, Blocks_ArePackedWithTheReason) {
  const auto directory = fresh_directory("blocks");
  const Sizes sizes{.experts = 3, .hidden = 64, .inner = 32};
  const auto path = directory / "m.gguf";
  {
    GgufWriter writer(path, gguf_keys(sizes, 32), 32);
    for (const NamedShape& tensor : gguf_tensors("Q8_0", sizes)) {
      writer.declare(tensor.name, tensor.type, tensor.shape);
    }
    writer.finish_with_zeros();
  }
  const Checkpoint mapped = Checkpoint::open(path, {.access = FileAccess::kMap});
  const auto source = mapped.layer_source(0);
  const Context context({.num_threads = 1});
  const MoeLayer layer = make_mapped(context, mapped, *source, WeightUse::kInPlace);
  EXPECT_EQ(layer.plan().in_place_bytes, 0U);
  EXPECT_NE(explain(layer.plan()).find("packed: kernels read codes of I8 from panels alone"),
            std::string::npos)
      << explain(layer.plan());
  std::filesystem::remove_all(directory);
}

// A factor of each expert changes values, whatever their type is: such matrices are no views.
TEST(MappedGgufFiles, FactorsOfExperts_AreInWhatIsReadAndLeaveNoView) {
  const auto directory = fresh_directory("factors");
  const Sizes sizes;
  const auto path = directory / "m.gguf";
  {
    std::vector<NamedShape> tensors = gguf_tensors("F32", sizes);
    tensors.push_back({"blk.0.ffn_down_exps.scale", "F32", {sizes.experts}});
    GgufWriter writer(path, gguf_keys(sizes, 32), 32);
    for (const NamedShape& tensor : tensors) writer.declare(tensor.name, tensor.type, tensor.shape);
    for (size_t i = 0; i + 1 < tensors.size(); ++i) write_tensor(writer, tensors[i], i);
    const std::vector<float> factors(static_cast<size_t>(sizes.experts), 3);
    writer.write(std::as_bytes(std::span(factors)));
    writer.finish();
  }
  const Checkpoint mapped = Checkpoint::open(path, {.access = FileAccess::kMap});
  const auto source = mapped.layer_source(0);
  const auto count = static_cast<size_t>(sizes.hidden * sizes.inner);
  std::vector<float> stored(count);
  const GgufReader reader = GgufReader::open(path);
  reader.read(*reader.find("blk.0.ffn_down_exps.weight"), count * sizeof(float),
              std::as_writable_bytes(std::span(stored)));
  std::vector<float> values(count);
  source->read(weights::kDown, 1, {0, sizes.hidden, 0, sizes.inner},
               std::as_writable_bytes(std::span(values)));
  for (size_t i = 0; i < count; ++i) ASSERT_EQ(values[i], stored[i] * 3) << i;
  EXPECT_TRUE(source->view(weights::kDown, 1).empty());
  EXPECT_FALSE(source->view(weights::kUp, 1).empty());
  const Context context({.num_threads = 1});
  EXPECT_EQ(make_mapped(context, mapped, *source, WeightUse::kInPlace).plan().in_place_bytes, 0U);
  std::filesystem::remove_all(directory);
}

struct Memory {
  int64_t anonymous = 0;
  int64_t of_files = 0;
  int64_t peak = 0;  // anonymous pages and those of files together
};

Memory memory_now() {
  std::ifstream status("/proc/self/status");
  Memory memory;
  const auto take = [](const std::string& line, const char* label, int64_t& bytes) {
    if (line.rfind(label, 0) == 0) bytes = std::stoll(line.substr(line.find(':') + 1)) * 1024;
  };
  for (std::string line; std::getline(status, line);) {
    take(line, "RssAnon:", memory.anonymous);
    take(line, "RssFile:", memory.of_files);
    take(line, "VmHWM:", memory.peak);
  }
  return memory;
}

// Runs `measure` in a process of its own and returns its figures, none if it failed.
std::vector<int64_t> measured_apart(const std::function<std::vector<int64_t>()>& measure) {
  int ends[2];
  if (pipe(ends) != 0) return {};
  const pid_t child = fork();
  if (child == 0) {
    std::vector<int64_t> figures;
    try {
      figures = measure();
    } catch (const std::exception& error) {
      fmt::print(stderr, "{}\n", error.what());
    }
    const size_t bytes = figures.size() * sizeof(int64_t);
    const bool wrote = write(ends[1], figures.data(), bytes) == static_cast<ssize_t>(bytes);
    _exit(wrote && !figures.empty() ? 0 : 1);
  }
  close(ends[1]);
  std::vector<int64_t> figures(8);
  const ssize_t got = read(ends[0], figures.data(), figures.size() * sizeof(int64_t));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  figures.resize(got > 0 ? static_cast<size_t>(got) / sizeof(int64_t) : 0);
  return status == 0 ? figures : std::vector<int64_t>();
}

constexpr int64_t kMiB = int64_t{1} << 20;
// 144 MiB of experts in bf16, 6 MiB each.
constexpr Sizes kLarge{.experts = 24, .hidden = 1024, .inner = 1024};

class MappedMemory : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
#if CONCLAVE_TEST_ASAN || CONCLAVE_TEST_TSAN
    GTEST_SKIP() << "sanitizers keep freed memory";
#endif
    if (memory_now().peak == 0) GTEST_SKIP() << "this kernel does not tell";
    directory_ = fresh_directory("memory");
    path_ = GetParam() == "gguf" ? write_gguf(directory_, "BF16", kLarge, 32, false)
                                 : write_directory();
  }
  void TearDown() override {
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }

  std::filesystem::path write_directory() const {
    std::ofstream(directory_ / "config.json") << fmt::format(
        R"({{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 1, "hidden_size": {}, "moe_intermediate_size": {},
            "num_experts": {}, "num_experts_per_tok": 2, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
            "intermediate_size": 64, "torch_dtype": "bfloat16"}})",
        kLarge.hidden, kLarge.inner, kLarge.experts);
    std::vector<std::string> names;
    std::vector<Tensor> tensors;
    const auto add = [&](std::string name, int64_t rows, int64_t cols) {
      names.push_back("model.layers.0.mlp." + std::move(name));
      tensors.push_back(random_tensor(DType::kBF16, rows, cols, tensors.size()));
    };
    add("gate.weight", kLarge.experts, kLarge.hidden);
    for (int64_t e = 0; e < kLarge.experts; ++e) {
      add(fmt::format("experts.{}.gate_proj.weight", e), kLarge.inner, kLarge.hidden);
      add(fmt::format("experts.{}.up_proj.weight", e), kLarge.inner, kLarge.hidden);
      add(fmt::format("experts.{}.down_proj.weight", e), kLarge.hidden, kLarge.inner);
    }
    std::vector<NamedTensor> named;
    for (size_t i = 0; i < names.size(); ++i) named.push_back({names[i], tensors[i].const_view()});
    save_safetensors(directory_ / "model.safetensors", named);
    return directory_;
  }

  std::filesystem::path directory_;
  std::filesystem::path path_;
};

// A mapped file is never in memory beside what is packed of it.
TEST_P(MappedMemory, Packing_HoldsThePanelsAndALittleOfTheFile) {
  const std::vector<int64_t> figures = measured_apart([&]() -> std::vector<int64_t> {
    const Context context({.num_threads = 2});
    const Checkpoint checkpoint = Checkpoint::open(path_, {.access = FileAccess::kMap});
    const auto source = checkpoint.layer_source(0);
    const Memory before = memory_now();
    const MoeLayer layer = make_mapped(context, checkpoint, *source, WeightUse::kPacked);
    const Memory after = memory_now();
    return {static_cast<int64_t>(layer.plan().packed_bytes), after.peak - before.peak,
            after.of_files - before.of_files, after.anonymous - before.anonymous};
  });
  ASSERT_EQ(figures.size(), 4U);
  const int64_t packed = figures[0];
  EXPECT_GE(packed, 144 * kMiB);
  EXPECT_GE(figures[3], packed);
  // A twentieth, and one part of an expert for each of two workers.
  EXPECT_LE(figures[1], packed + packed / 20 + 2 * 4 * kMiB);
  EXPECT_LE(figures[2], 4 * kMiB);
}

// In place there is the file, and nothing else of that order.
TEST_P(MappedMemory, InPlace_HoldsTheFileAlone) {
  const std::vector<int64_t> figures = measured_apart([&]() -> std::vector<int64_t> {
    const Context context({.num_threads = 2});
    const Checkpoint checkpoint = Checkpoint::open(path_, {.access = FileAccess::kMap});
    const auto source = checkpoint.layer_source(0);
    const Memory before = memory_now();
    const MoeLayer layer = make_mapped(context, checkpoint, *source, WeightUse::kInPlace);
    const Memory made = memory_now();
    // Every expert has rows.
    const Tensor hidden = random_tensor(DType::kBF16, 32, kLarge.hidden, 5);
    const Tensor logits = random_tensor(DType::kF32, 32, kLarge.experts, 6);
    run_layer(layer, hidden.view(), DType::kBF16, {.router_logits = logits.view()});
    const Memory run = memory_now();
    return {static_cast<int64_t>(layer.plan().in_place_bytes),
            static_cast<int64_t>(layer.plan().packed_bytes),
            static_cast<int64_t>(layer.workspace_bytes()),
            made.peak - before.peak,
            run.anonymous - before.anonymous,
            run.peak - before.peak};
  });
  ASSERT_EQ(figures.size(), 6U);
  const int64_t in_place = figures[0];
  EXPECT_EQ(in_place, 144 * kMiB);
  EXPECT_EQ(figures[1], 0);
  EXPECT_LE(figures[3], 8 * kMiB);               // made without reading experts
  EXPECT_LE(figures[4], figures[2] + 8 * kMiB);  // the workspace
  EXPECT_LE(figures[5], in_place + figures[2] + 16 * kMiB);
}

INSTANTIATE_TEST_SUITE_P(Containers, MappedMemory, ::testing::Values("gguf", "safetensors"),
                         [](const auto& row) { return row.param; });

}  // namespace
}  // namespace conclave
