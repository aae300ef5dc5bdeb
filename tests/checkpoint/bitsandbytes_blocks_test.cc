// Codes of bitsandbytes in blocks of every size, of both types, with scales that are numbers or
// codes, in bytes that any type holds: from files and pushed they are the values of the formula.
#include "checkpoint/tiny_model.h"
#include "quant/weight_format.h"

#include "conclave/checkpoint.h"
#include "conclave/quantise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <ostream>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using nlohmann::json;

struct Case {
  int64_t block = 64;
  DType codes = DType::kNF4;
  bool nested = false;
  DType storage = DType::kU8;
};
void PrintTo(const Case& made, std::ostream* out) {
  *out << (made.codes == DType::kNF4 ? "nf4" : "fp4") << "_" << made.block
       << (made.nested ? "_nested_" : "_") << to_string(made.storage);
}

std::vector<Case> cases() {
  std::vector<Case> found;
  for (const int64_t block : {32, 64, 128, 256, 512, 1024, 2048, 4096}) {
    for (const bool nested : {false, true}) {
      found.push_back({.block = block, .codes = DType::kNF4, .nested = nested});
      found.push_back({.block = block, .codes = DType::kBnbFP4, .nested = nested});
    }
  }
  for (const DType storage : {DType::kI8, DType::kF16, DType::kBF16, DType::kF32, DType::kF8E4M3}) {
    found.push_back({.block = 256, .nested = true, .storage = storage});
    found.push_back({.block = 64, .codes = DType::kBnbFP4, .storage = storage});
  }
  return found;
}

class Blocks : public ::testing::TestWithParam<Case> {
 protected:
  // Expert matrices become codes; their exact values are kept by name.
  Blocks()
      : model_(make_tiny_model(
            {.family = "mixtral", .num_experts = 2, .hidden_size = 128, .intermediate_size = 96})) {
    const Case& made = GetParam();
    model_.config["quantization_config"] = {
        {"quant_method", "bitsandbytes"},
        {"load_in_4bit", true},
        {"bnb_4bit_quant_type", made.codes == DType::kNF4 ? "nf4" : "fp4"},
        {"bnb_4bit_use_double_quant", made.nested},
        {"bnb_4bit_quant_storage", "uint8"}};
    std::vector<TinyTensor> plain;
    std::swap(plain, model_.tensors);
    for (TinyTensor& tensor : plain) {
      if (tensor.name.find(".experts.") == std::string::npos) {
        model_.tensors.push_back(std::move(tensor));
      } else {
        add_codes(tensor.name, tensor.shape[0], tensor.shape[1]);
      }
    }
  }

  template <class T>
  void add(const std::string& name, DType dtype, std::vector<int64_t> shape,
           const std::vector<T>& values) {
    TinyTensor& tensor = model_.add(name, dtype, std::move(shape));
    tensor.bytes.resize(values.size() * sizeof(T));
    std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  }

  std::vector<float> numbers(int64_t count) {
    std::uniform_real_distribution<float> uniform(0.5F, 1.5F);
    std::vector<float> found(static_cast<size_t>(count));
    for (float& number : found) number = uniform(random_);
    return found;
  }
  std::vector<uint8_t> bytes(int64_t count) {
    std::vector<uint8_t> found(static_cast<size_t>(count));
    for (uint8_t& byte : found) byte = static_cast<uint8_t>(random_());
    return found;
  }

  // The scales of blocks, as numbers or as codes of a table.
  std::vector<float> add_scales(const std::string& name, int64_t blocks, json& state) {
    if (!GetParam().nested) {
      const std::vector<float> scales = numbers(blocks);
      add(name + ".absmax", DType::kF32, {blocks}, scales);
      return scales;
    }
    const std::vector<uint8_t> codes = bytes(blocks);
    const std::vector<float> table = numbers(256);
    const std::vector<float> largest = numbers((blocks + 255) / 256);
    const float offset = 0.375F;
    add(name + ".absmax", DType::kU8, {blocks}, codes);
    add(name + ".nested_absmax", DType::kF32, {std::ssize(largest)}, largest);
    add(name + ".nested_quant_map", DType::kF32, {256}, table);
    state["nested_blocksize"] = 256;
    state["nested_offset"] = offset;
    state["nested_dtype"] = "float32";
    std::vector<float> scales;
    for (size_t i = 0; i < codes.size(); ++i) {
      scales.push_back(table[codes[i]] * largest[i / 256] + offset);
    }
    return scales;
  }

  void add_codes(const std::string& name, int64_t rows, int64_t cols) {
    const Case& made = GetParam();
    const bool nf4 = made.codes == DType::kNF4;
    const int64_t count = rows * cols;
    const std::vector<uint8_t> pairs = bytes(count / 2);
    add(name, made.storage, {count / 2 / byte_size(made.storage), 1}, pairs);
    json state = {{"quant_type", nf4 ? "nf4" : "fp4"},
                  {"blocksize", made.block},
                  {"dtype", "bfloat16"},
                  {"shape", {rows, cols}}};
    const int64_t blocks = (count + made.block - 1) / made.block;
    const std::vector<float> scales = add_scales(name, blocks, state);
    const quant::CodeBook& book = *quant::format_of(made.codes).codes;
    std::vector<float> table;
    for (uint8_t code = 0; code < 16; ++code) table.push_back(book.decode(code));
    add(name + ".quant_map", DType::kF32, {16}, table);
    const std::string text = state.dump();
    add(name + ".quant_state.bitsandbytes__" + (nf4 ? "nf4" : "fp4"), DType::kU8,
        {std::ssize(text)}, std::vector<char>(text.begin(), text.end()));
    std::vector<float>& values = values_[name];
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t pair = pairs[static_cast<size_t>(i / 2)];
      const int code = i % 2 == 0 ? pair >> 4 : pair & 15;
      values.push_back(table[static_cast<size_t>(code)] *
                       scales[static_cast<size_t>(i / made.block)]);
    }
  }

  void expect_values(const MoeSpec& spec, const WeightSource& source, int64_t layer) const {
    const std::map<std::string, WeightId> matrices = {
        {"w1", weights::kGate}, {"w3", weights::kUp}, {"w2", weights::kDown}};
    for (const auto& [matrix, id] : matrices) {
      const WeightInfo info = source.describe(id);
      EXPECT_EQ(info.dtype, GetParam().codes);
      for (int64_t expert = 0; expert < info.count; ++expert) {
        const std::string name = "model.layers." + std::to_string(layer) +
                                 ".block_sparse_moe.experts." + std::to_string(expert) + "." +
                                 matrix + ".weight";
        std::vector<float> values(static_cast<size_t>(info.rows * info.cols));
        read_values(spec.quant, source, id, expert, {0, info.rows, 0, info.cols}, values);
        EXPECT_EQ(values, values_.at(name)) << name;
      }
    }
  }

  std::mt19937 random_{11};
  TinyModel model_;
  std::map<std::string, std::vector<float>> values_;
};

TEST_P(Blocks, FileAndFeed_HaveTheValuesOfTheFormula) {
  const TempDir directory;
  write_single(model_, directory.path());
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  ASSERT_EQ(checkpoint.layers().size(), model_.moe_layers.size());
  for (const CheckpointLayer& layer : checkpoint.layers()) {
    expect_values(layer.spec, *checkpoint.layer_source(layer.index), layer.index);
  }

  for (int turn = 0; turn < 2; ++turn) {
    CheckpointFeed feed = CheckpointFeed::from_config(model_.config.dump());
    for (const TinyTensor& tensor : model_.tensors) {
      static_cast<void>(feed.put(tensor.name, {.data = tensor.bytes.data(),
                                               .dtype = tensor.dtype,
                                               .shape = Shape(std::span(tensor.shape))}));
    }
    ASSERT_EQ(feed.missing(), std::vector<std::string>());
    for (const CheckpointLayer& layer : checkpoint.layers()) {
      EXPECT_EQ(feed.layer(layer.index).spec.quant, layer.spec.quant);
      expect_values(feed.layer(layer.index).spec, *feed.layer_source(layer.index), layer.index);
    }
    std::shuffle(model_.tensors.begin(), model_.tensors.end(), random_);
  }
}

INSTANTIATE_TEST_SUITE_P(Bitsandbytes, Blocks, ::testing::ValuesIn(cases()), [](const auto& test) {
  std::ostringstream name;
  PrintTo(test.param, &name);
  return name.str();
});

}  // namespace
}  // namespace conclave::testing
