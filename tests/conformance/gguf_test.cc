// Layers of the GGUF models in testdata/gguf, which gguf-py wrote, against recorded float64
// results.
#include "conclave/gguf.h"

#include "core/weight_types.h"
#include "support/golden_record.h"
#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
const fs::path kGgufModels = "testdata/gguf";

std::vector<std::string> gguf_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kGgufModels)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

fs::path first_part(const std::string& name) {
  for (const auto& entry : fs::directory_iterator(kGgufModels / name)) {
    const std::string file = entry.path().filename().string();
    if (file == "model.gguf" || file.starts_with("model-00001-of-")) return entry.path();
  }
  return kGgufModels / name / "missing.gguf";
}

std::string test_name(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

double bar_of(const Plan& plan) {
  const bool in_float32 = plan.arithmetic == "f32_fma";
  return accuracy_bar(in_float32 ? DType::kF32 : DType::kBF16, DType::kF32);
}

class GgufModel : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(GgufModel, EveryLayer_MatchesTheRecordedFloat64Results) {
  const auto& [name, isa] = GetParam();
  const Checkpoint checkpoint = Checkpoint::open(first_part(name));
  const SafetensorsFile golden =
      SafetensorsFile::open(kGgufModels / name / "reference.safetensors");
  const Context context({.num_threads = 2, .isa = isa});
  ASSERT_FALSE(checkpoint.layers().empty());
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    SCOPED_TRACE(fmt::format("layer {}", layer.index));
    ASSERT_TRUE(layer.support) << layer.support.reason();
    const std::string prefix = fmt::format("layers.{}.", layer.index);
    const auto source = checkpoint.layer_source(layer.index);
    const Tensor hidden = golden.load(prefix + "hidden");
    ForwardArgs args;
    Tensor tokens;
    if (golden.find(prefix + "token_ids") != nullptr) {
      tokens = golden.load(prefix + "token_ids");
      args.token_ids = tokens.view();
    }
    const std::vector<double> expected = as_doubles(golden.load(prefix + "output"));
    for (const char* arithmetic : {"", "f32_fma"}) {
      const LayerOptions options{.max_tokens = 8, .arithmetic = arithmetic};
      const MoeLayer moe = MoeLayer::create(context, layer.spec, *source, options);
      const LayerOutput output = run_layer(moe, hidden.view(), DType::kF32, args);
      EXPECT_TRUE(same_bits(output.ids, golden.load(prefix + "topk_ids")));
      EXPECT_LE(worst(token_errors(output.out.view(), expected)), bar_of(moe.plan()))
          << moe.plan().arithmetic;
    }

    // The library's own oracle reads the same codes and scales.
    ReferenceArgs reference{.hidden = hidden.view()};
    if (!args.token_ids.empty()) reference.token_ids = args.token_ids;
    const ReferenceResult own = reference_forward(context, layer.spec, *source, reference);
    double largest = 0;
    double difference = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max(largest, std::abs(expected[i]));
      difference = std::max(difference, std::abs(own.output[i] - expected[i]));
    }
    EXPECT_LE(difference, 1e-6 * largest);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GgufModel,
                         ::testing::Combine(::testing::ValuesIn(gguf_names()),
                                            ::testing::ValuesIn(usable_isas())),
                         [](const auto& row) {
                           return test_name(std::get<0>(row.param) + "_" + std::get<1>(row.param));
                         });

// A layer's codes and scales stand for the values that gguf-py gives the blocks, whichever types
// gate, up and down have.
TEST(GgufForms, TypesOfALayer_ShareCodesAndGroups) {
  const auto spec_of = [](const char* name) {
    return Checkpoint::open(first_part(name)).layers().front().spec;
  };
  const MoeSpec q4 = spec_of("llama-q4_0");
  EXPECT_EQ(q4.weight_dtype, DType::kI4);
  EXPECT_EQ(q4.quant.block_cols, 32);
  const MoeSpec mixed = spec_of("llama-old");
  EXPECT_EQ(mixed.weight_dtype, DType::kI8);
  EXPECT_EQ(mixed.quant.block_cols, 32);
  const MoeSpec six = spec_of("qwen3moe-iq4");
  EXPECT_EQ(six.weight_dtype, DType::kI8);
  EXPECT_EQ(six.quant.block_cols, 16) << "Q6_K has the smaller groups";
  EXPECT_EQ(six.quant.zeros, WeightZero::kNone);
  const MoeSpec with_offsets = spec_of("qwen3moe-q4_k_m");
  EXPECT_EQ(with_offsets.weight_dtype, DType::kI8) << "Q6_K has codes of 6 bits";
  EXPECT_EQ(with_offsets.quant.zeros, WeightZero::kOffset);
  EXPECT_EQ(with_offsets.quant.block_cols, 16);
  EXPECT_EQ(with_offsets.quant.down_codes.dtype, DType::kI6);
  const MoeSpec small_blocks = spec_of("glm4moe-q4_1");
  EXPECT_EQ(small_blocks.weight_dtype, DType::kI8) << "Q5_1 has codes of 5 bits";
  EXPECT_EQ(shared_weight_dtype(small_blocks), DType::kI8) << "Q8_0, with offsets of zero";
  EXPECT_EQ(small_blocks.quant.zeros, WeightZero::kOffset);
  EXPECT_EQ(spec_of("gpt-oss-mxfp4").weight_dtype, DType::kF4);
  EXPECT_EQ(spec_of("qwen3moe-nvfp4").weight_dtype, DType::kF4);
  EXPECT_EQ(spec_of("olmoe-iq4_nl").weight_dtype, DType::kI8) << "Q5_0 has codes of 5 bits";
  const MoeSpec half = spec_of("qwen2moe-f16");
  EXPECT_EQ(half.weight_dtype, DType::kF16);
  EXPECT_EQ(shared_weight_dtype(half), DType::kBF16);
}

TEST(GgufModels, AnyPart_OpensOnlyIfItIsTheFirst) {
  const fs::path second = kGgufModels / "llama-split" / "model-00002-of-00003.gguf";
  EXPECT_THROW(Checkpoint::open(second), Error);
  EXPECT_EQ(Checkpoint::open(first_part("llama-split")).layers().size(), 2U);
}

// The type of a tensor is a word of the header, behind its name, rank and sizes.
TEST(GgufModels, RouterOfIntegers_IsRefusedByType) {
  std::ifstream in(first_part("llama-q4_0"), std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(in), {});
  const std::string name = "blk.0.ffn_gate_inp.weight";
  const size_t at = bytes.find(name);
  ASSERT_NE(at, std::string::npos);
  const size_t type = at + name.size() + sizeof(uint32_t) + 2 * sizeof(uint64_t);
  constexpr uint32_t kIntegers = 26;  // I32, as large as the F32 of the file
  std::memcpy(bytes.data() + type, &kIntegers, sizeof(kIntegers));
  const fs::path path = fs::path(::testing::TempDir()) / "router-of-integers.gguf";
  std::ofstream(path, std::ios::binary) << bytes;
  try {
    Checkpoint::open(path);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTensorDType);
    EXPECT_EQ(error.detail().tensor, name);
    EXPECT_EQ(error.detail().found, "I32");
  }
}

TEST(GgufModels, OptionsOfDirectories_AreRefusedByName) {
  try {
    Checkpoint::open(first_part("llama-q4_0"), {.experts = ExpertSet::kVision});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  }
}

// Reads all that layers would; returns the error, if any.
std::optional<Error> read_all_verified(const fs::path& path) {
  try {
    const Checkpoint checkpoint = Checkpoint::open(path, {.verify_manifest = true});
    for (const CheckpointLayer& layer : checkpoint.layers()) {
      const auto source = checkpoint.layer_source(layer.index);
      for (const WeightId id : weights::kAll) {
        const WeightInfo info = source->describe(id);
        std::vector<std::byte> bytes(
            static_cast<size_t>(info.rows * ((info.cols * bit_size(info.dtype) + 7) / 8)));
        for (int64_t expert = 0; expert < info.count; ++expert) {
          source->read(id, expert, {0, info.rows, 0, info.cols}, bytes);
        }
      }
    }
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

TEST(GgufModels, Manifest_FindsDamageAndOtherTensors) {
  const fs::path directory = fs::path(::testing::TempDir()) / "gguf-manifest";
  fs::remove_all(directory);
  fs::create_directory(directory);
  const fs::path path = directory / "model.gguf";
  fs::copy_file(first_part("llama-q4_0"), path);
  ASSERT_TRUE(read_all_verified(path));
  EXPECT_EQ(read_all_verified(path)->code(), ErrorCode::kFileNotFound);
  EXPECT_EQ(Checkpoint::write_manifest(path), directory / "model.gguf.conclave.manifest.json");
  const auto fresh = read_all_verified(path);
  EXPECT_FALSE(fresh) << fresh->what();

  // Not the file that is damaged: a reader notices that it was written to.
  const GgufReader file = GgufReader::open(first_part("llama-q4_0"));
  std::ifstream in(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  int found = 0;
  for (const GgufTensorInfo& tensor : file.tensors()) {
    if (tensor.name.find("_exps") == std::string::npos) continue;
    std::vector<std::byte> data(tensor.bytes);
    file.read(tensor, 0, data);
    const std::string_view view(static_cast<const char*>(static_cast<const void*>(data.data())),
                                data.size());
    const size_t at = bytes.find(view);
    ASSERT_NE(at, std::string::npos);
    std::string damaged = bytes;
    damaged[at + data.size() - 1] = static_cast<char>(damaged[at + data.size() - 1] ^ 1);
    std::ofstream(path, std::ios::binary) << damaged;
    const auto error = read_all_verified(path);
    ASSERT_TRUE(error) << tensor.name;
    EXPECT_EQ(error->code(), ErrorCode::kChecksum) << error->what();
    EXPECT_EQ(error->detail().tensor, tensor.name);
    ++found;
  }
  EXPECT_GT(found, 2);

  // A manifest of another model.
  fs::copy_file(first_part("llama-q4_0"), path, fs::copy_options::overwrite_existing);
  const fs::path other = directory / "other.gguf";
  fs::copy_file(first_part("qwen3moe-q4_k_m"), other);
  fs::rename(Checkpoint::write_manifest(other), directory / "model.gguf.conclave.manifest.json");
  const auto mixed = read_all_verified(path);
  ASSERT_TRUE(mixed);
  EXPECT_EQ(mixed->code(), ErrorCode::kChecksum) << mixed->what();
}

}  // namespace
}  // namespace conclave::testing
