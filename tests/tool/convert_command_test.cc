// Runs conclave convert as a user does: what is copied, kept, replaced, refused and reported.
#include "convert_tool.h"

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

TEST(Convert, OtherTensorsAndFiles_AreCopiedByteForByte) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const std::string source = bundled("mixtral-tiny");
  ASSERT_EQ(convert(source, out, "int8-channel").exit_code, 0);
  const SafetensorsFile before = SafetensorsFile::open(fs::path(source) / "model.safetensors");
  const SafetensorsFile after = SafetensorsFile::open(out / "model.safetensors");
  int64_t copied = 0;
  for (const TensorInfo& tensor : before.tensors()) {
    if (tensor.name.find(".experts.") != std::string::npos) continue;
    const TensorInfo* const same = after.find(tensor.name);
    ASSERT_NE(same, nullptr) << tensor.name;
    EXPECT_EQ(same->shape, tensor.shape);
    std::vector<std::byte> expected(tensor.bytes);
    std::vector<std::byte> actual(same->bytes);
    before.read(tensor, 0, expected);
    after.read(*same, 0, actual);
    EXPECT_EQ(actual, expected) << tensor.name;
    ++copied;
  }
  EXPECT_GT(copied, 10);
  EXPECT_EQ(read_text(out / "generation_config.json"),
            read_text(fs::path(source) / "generation_config.json"));
  Json config = read_json(out / "config.json");
  const Json ignored = config["quantization_config"]["ignore"];
  for (const char* name :
       {"lm_head", "model.layers.0.block_sparse_moe.gate", "model.layers.1.self_attn.q_proj"}) {
    EXPECT_NE(std::ranges::find(ignored, name), ignored.end()) << name;
  }
  config.erase("quantization_config");
  EXPECT_EQ(config, read_json(fs::path(source) / "config.json"));
}

TEST(Convert, Shards_HoldAtMostTheirSizeAndAreIndexed) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  ASSERT_EQ(
      convert(bundled("qwen3-moe-tiny"), out, "fp8-channel", {"--shard-size", "100kB"}).exit_code,
      0);
  const Json index = read_json(out / "model.safetensors.index.json");
  std::set<std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) files.insert(file);
  EXPECT_GT(files.size(), 3U);
  for (const std::string& file : files) EXPECT_LT(fs::file_size(out / file), 200'000U);
  EXPECT_EQ(run_tool({"verify", out.string(), "--layers", "0"}).exit_code, 0);
}

TEST(Convert, ThreadsAndPieces_DoNotChangeTheBytes) {
  const ScratchDirectory scratch;
  const std::string source = bundled("qwen2-moe-tiny");
  ASSERT_EQ(convert(source, scratch / "one", "fp8-block", {"--threads", "1"}).exit_code, 0);
  ASSERT_EQ(convert(source, scratch / "four", "fp8-block", {"--threads", "4"}).exit_code, 0);
  EXPECT_EQ(read_text(scratch / "one" / "model.safetensors"),
            read_text(scratch / "four" / "model.safetensors"));
}

TEST(Convert, Layers_AloneAreConverted) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult result =
      convert(bundled("qwen3-moe-tiny"), out, "fp8-channel", {"--layers", "1-2"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Checkpoint model = Checkpoint::open(out);
  EXPECT_EQ(model.layer(0).spec.weight_dtype, DType::kBF16);
  EXPECT_EQ(model.layer(1).spec.weight_dtype, DType::kF8E4M3);
  EXPECT_EQ(model.layer(2).spec.weight_dtype, DType::kF8E4M3);
  EXPECT_EQ(read_json(out / "conversion.json")["layers"].size(), 2U);
  EXPECT_EQ(run_tool({"verify", out.string()}).exit_code, 0);
}

TEST(Convert, KeptLayers_StayAsTheyAreOrBecomeValues) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult result =
      convert(bundled("qwen2-moe-tiny"), out, "int8-channel",
              {"--keep", "*.layers.0.*=source", "--keep", "*.shared_expert.*=bf16"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Checkpoint model = Checkpoint::open(out);
  EXPECT_EQ(model.layer(0).spec.weight_dtype, DType::kF32);
  EXPECT_EQ(model.layer(2).spec.weight_dtype, DType::kI8);
  EXPECT_EQ(model.layer(2).spec.shared.weight_dtype, DType::kBF16);
  EXPECT_EQ(run_tool({"verify", out.string()}).exit_code, 0);
}

TEST(Convert, OneMatrixKept_IsReadInAFormThatHoldsAll) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult result =
      convert(bundled("mixtral-tiny"), out, "int8-channel", {"--keep", "*.experts.1.w2=source"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(Checkpoint::open(out).layer(0).spec.weight_dtype, DType::kF32);
  const ToolResult inspected = run_tool({"inspect", out.string()});
  EXPECT_NE(inspected.out.find("stored in several forms"), std::string::npos) << inspected.out;
  EXPECT_EQ(run_tool({"verify", out.string()}).exit_code, 0);
}

TEST(Convert, WrongUsage_IsSaid) {
  const ScratchDirectory scratch;
  const std::string source = bundled("mixtral-tiny");
  const fs::path out = scratch / "out";
  EXPECT_EQ(run_tool({"convert", source, out.string()}).exit_code, 2);
  EXPECT_EQ(convert(source, out, "fp8-static").exit_code, 2);
  EXPECT_EQ(convert(source, out, "int8-channel", {"--keep", "nonsense"}).exit_code, 2);
  EXPECT_EQ(convert(source, out, "int8-channel", {"--keep", "*=source"}).exit_code, 2);
  const ToolResult unused =
      convert(source, out, "int8-channel", {"--keep", "*.no_such_layer=source"});
  EXPECT_EQ(unused.exit_code, 2);
  EXPECT_NE(unused.err.find("model.layers.0.block_sparse_moe.experts.0.w1"), std::string::npos)
      << unused.err;
  EXPECT_EQ(convert(source, out, "int8-channel", {"--layers", "7"}).exit_code, 3);
  EXPECT_EQ(convert((scratch / "none").string(), out, "int8-channel").exit_code, 3);
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(Convert, Destination_MustNotExistUnlessForced) {
  const ScratchDirectory scratch;
  const std::string source = bundled("mixtral-tiny");
  const fs::path out = scratch / "out";
  ASSERT_EQ(convert(source, out, "int8-channel").exit_code, 0);
  const ToolResult refused = convert(source, out, "fp8-channel");
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_NE(refused.err.find("[kFileWrite]: the destination exists"), std::string::npos);
  ASSERT_EQ(convert(source, out, "fp8-channel", {"--force"}).exit_code, 0);
  EXPECT_EQ(Checkpoint::open(out).layer(0).spec.weight_dtype, DType::kF8E4M3);
  EXPECT_FALSE(fs::exists(out.string() + ".replaced"));

  write_text(scratch / "letter.txt", "mine");
  EXPECT_EQ(convert(source, scratch.path(), "fp8-channel", {"--force"}).exit_code, 4);
  EXPECT_EQ(read_text(scratch / "letter.txt"), "mine");
  const fs::path copy = scratch / "copy";
  copy_model("mixtral-tiny", copy);
  EXPECT_EQ(convert(copy.string(), copy, "fp8-channel", {"--force"}).exit_code, 4);
  EXPECT_EQ(Checkpoint::open(copy).layer(0).spec.weight_dtype, DType::kBF16);
}

TEST(Convert, DestinationThatCannotBeMade_IsSaid) {
  const ScratchDirectory scratch;
  write_text(scratch / "file", "text");
  const ToolResult result =
      convert(bundled("mixtral-tiny"), scratch / "file" / "out", "int8-channel");
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_NE(result.err.find("[kFileWrite]"), std::string::npos) << result.err;
}

TEST(Convert, WeightThatIsNotFinite_IsNamed) {
  const ScratchDirectory scratch;
  copy_model("mixtral-tiny", scratch / "model");
  const fs::path file = scratch / "model" / "model.safetensors";
  const std::string name = "model.layers.1.block_sparse_moe.experts.3.w2.weight";
  const uint64_t offset = SafetensorsFile::open(file).find(name)->file_offset;
  std::string bytes = read_text(file);
  bytes[offset + 2] = static_cast<char>(0x80);  // bf16 infinity, in row 0, column 1
  bytes[offset + 3] = static_cast<char>(0x7f);
  write_text(file, bytes);
  const ToolResult result = convert((scratch / "model").string(), scratch / "out", "int8-channel");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("[kTensorValue]: a weight is not finite"), std::string::npos);
  EXPECT_NE(result.err.find(name), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("inf in row 0, column 1"), std::string::npos) << result.err;
  EXPECT_FALSE(fs::exists(scratch / "out"));
}

TEST(Convert, LinkOutOfTheModel_IsNotFollowed) {
  const ScratchDirectory scratch;
  copy_model("mixtral-tiny", scratch / "model");
  write_text(scratch / "secret.txt", "secret");
  fs::create_symlink(scratch / "secret.txt", scratch / "model" / "tokenizer.json");
  const ToolResult result = convert((scratch / "model").string(), scratch / "out", "int8-channel");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("[kPathEscape]"), std::string::npos) << result.err;
  EXPECT_FALSE(fs::exists(scratch / "out"));
}

TEST(Convert, Search_HasSmallerErrorsThanAmax) {
  const ScratchDirectory scratch;
  const std::string source = (scratch / "model").string();
  ASSERT_EQ(run_tool({"synth", "-E", "3", "-k", "1", "-H", "64", "-I", "32", source}).exit_code, 0);
  const auto error_of = [&](const char* name, const char* rule) {
    const fs::path out = scratch / name;
    EXPECT_EQ(convert(source, out, "int4-group32", {"--scales", rule}).exit_code, 0);
    std::vector<double> errors;
    const Json report = read_json(out / "conversion.json");
    for (const Json& matrix : report["matrices"]) {
      errors.push_back(matrix["relative_error"].get<double>());
    }
    return errors;
  };
  const std::vector<double> amax = error_of("amax", "amax");
  const std::vector<double> search = error_of("search", "search");
  ASSERT_EQ(amax.size(), search.size());
  for (size_t i = 0; i < amax.size(); ++i) EXPECT_LT(search[i], amax[i]) << i;
}

TEST(Convert, Report_IsATableAFileAndAPage) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const fs::path copy = scratch / "report.json";
  const ToolResult result =
      convert(bundled("qwen2-moe-tiny"), out, "int8-channel", {"--report", copy.string()});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("output worst"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("not copied: reference.safetensors, transformers.safetensors"),
            std::string::npos)
      << result.out;
  EXPECT_EQ(read_json(copy), read_json(out / "conversion.json"));
  const std::string page = read_text(out / "conversion.html");
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_EQ(page.find("http"), std::string::npos);
  for (const char* part : {"<svg", "prefers-color-scheme: dark", "shared_down", "Worst tokens"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
}

// The file has rows of both layers; a layer's median is then that of its own rows.
TEST(Convert, RecordedRows_AreThoseOfTheComparison) {
  const ScratchDirectory scratch;
  const std::string model = bundled("qwen3-moe-tiny");
  const fs::path rows = fs::path(model) / "reference.safetensors";
  const auto report = [&](const fs::path& out, std::vector<std::string> more) {
    const ToolResult result = convert(model, out, "int8-channel", std::move(more));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return read_json(out / "conversion.json");
  };
  const Json random = report(scratch / "random", {});
  const Json recorded = report(scratch / "recorded", {"--input", rows.string()});
  EXPECT_EQ(random["input"], "");
  EXPECT_EQ(recorded["input"], rows.string());
  const SafetensorsFile file = SafetensorsFile::open(rows);
  ASSERT_EQ(recorded["layers"].size(), random["layers"].size());
  for (size_t i = 0; i < recorded["layers"].size(); ++i) {
    const Json& layer = recorded["layers"][i];
    const TensorInfo* const hidden =
        file.find("layers." + std::to_string(layer["layer"].get<int64_t>()) + ".hidden_states");
    ASSERT_NE(hidden, nullptr);
    EXPECT_EQ(static_cast<int64_t>(layer["tokens"].size()), hidden->shape[0]);
    EXPECT_GT(layer["median"].get<double>(), 0.0);
    EXPECT_NE(layer["median"], random["layers"][i]["median"]);
  }
  const std::string page = read_text(scratch / "recorded" / "conversion.html");
  EXPECT_NE(page.find("recorded rows"), std::string::npos);
  EXPECT_EQ(page.find("random rows"), std::string::npos);
}

TEST(Convert, RowsOfAnotherWidth_AreRefusedBeforeAnythingIsWritten) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const fs::path rows = scratch / "rows.safetensors";
  Tensor hidden(DType::kF32, {3, 7});
  std::fill_n(hidden.as<float>(), 3 * 7, 1.0F);
  const NamedTensor named{"hidden_states", hidden.const_view()};
  save_safetensors(rows.string(), {&named, 1});
  const ToolResult result =
      convert(bundled("mixtral-tiny"), out, "int8-channel", {"--input", rows.string()});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.err.find("kTensorShape"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("rows.safetensors"), std::string::npos) << result.err;
  EXPECT_FALSE(fs::exists(out));
  EXPECT_FALSE(fs::exists(out.string() + ".partial"));
}

TEST(Convert, NoTokens_LeavesLayersUnmeasured) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const ToolResult result = run_tool({"convert", bundled("mixtral-tiny"), out.string(), "--format",
                                      "int8-channel", "--tokens", "0"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(read_json(out / "conversion.json")["layers"].empty());
  EXPECT_EQ(read_text(out / "conversion.html").find("Worst tokens"), std::string::npos);
}

}  // namespace
}  // namespace conclave::testing
