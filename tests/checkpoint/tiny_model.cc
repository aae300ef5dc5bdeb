#include "checkpoint/tiny_model.h"

#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace conclave::testing {
namespace {

constexpr int64_t kLayers = 3;
constexpr int64_t kSharedSize = 7;

uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 31)) * 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 29)) * 0xbf58476d1ce4e5b9ULL;
  return value ^ (value >> 32);
}

std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(mix(seed + i * 0x10001));
  return bytes;
}

size_t bytes_of(DType dtype, const std::vector<int64_t>& shape) {
  auto bytes = static_cast<size_t>(byte_size(dtype));
  for (int64_t size : shape) bytes *= static_cast<size_t>(size);
  return bytes;
}

std::vector<std::byte> transposed(const std::vector<std::byte>& matrix, int64_t rows,
                                  int64_t cols) {
  const size_t element = matrix.size() / static_cast<size_t>(rows * cols);
  std::vector<std::byte> result(matrix.size());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      std::memcpy(result.data() + static_cast<size_t>(col * rows + row) * element,
                  matrix.data() + static_cast<size_t>(row * cols + col) * element, element);
    }
  }
  return result;
}

void append(std::vector<std::byte>& to, const std::vector<std::byte>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

class Builder {
 public:
  explicit Builder(const TinyOptions& options) : options_(options) {}

  TinyModel build() {
    const bool qwen = options_.family.starts_with("qwen");
    write_config(qwen);
    add_plain(options_.trunk + "embed_tokens.weight", {11, options_.hidden_size});
    add_plain("lm_head.weight", {11, options_.hidden_size});
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      prefix_ = options_.trunk + "layers." + std::to_string(layer) + ".";
      add_plain(prefix_ + "input_layernorm.weight", {options_.hidden_size});
      add_plain(prefix_ + "self_attn.q_proj.weight", {options_.hidden_size, options_.hidden_size});
      if (qwen && layer == 1) {
        add_plain(prefix_ + "mlp.gate_proj.weight", {9, options_.hidden_size});
        continue;
      }
      add_moe_layer(layer);
      model_.moe_layers.push_back(layer);
    }
    return std::move(model_);
  }

 private:
  void write_config(bool qwen) {
    model_.config = {{"model_type", options_.family},
                     {"hidden_size", options_.hidden_size},
                     {"num_hidden_layers", kLayers},
                     {"num_experts_per_tok", 2},
                     {"hidden_act", "silu"}};
    model_.config[options_.family == "mixtral" ? "num_local_experts" : "num_experts"] =
        options_.num_experts;
    model_.config[qwen ? "moe_intermediate_size" : "intermediate_size"] =
        options_.intermediate_size;
    if (qwen) model_.config["mlp_only_layers"] = {1};
    if (options_.family == "qwen2_moe") {
      model_.config["shared_expert_intermediate_size"] = kSharedSize;
    }
  }

  void add_plain(const std::string& name, const std::vector<int64_t>& shape) {
    TinyTensor& tensor = model_.add(name, options_.dtype, shape);
    tensor.bytes = random_bytes(tensor.bytes.size(), std::hash<std::string>{}(name));
  }

  void add_matrix(const std::string& name, int64_t layer, WeightId role, int64_t expert,
                  int64_t rows, int64_t cols) {
    model_.add(prefix_ + name, options_.dtype, {rows, cols}).bytes =
        tiny_matrix(options_.dtype, layer, role, expert, rows, cols);
  }

  void add_moe_layer(int64_t layer) {
    const int64_t h = options_.hidden_size;
    const bool old_mixtral = options_.family == "mixtral" && options_.layout == Layout::kPerExpert;
    const std::string block = old_mixtral ? "block_sparse_moe." : "mlp.";
    add_matrix(block + "gate.weight", layer, weights::kRouter, 0, options_.num_experts, h);
    if (options_.layout == Layout::kPerExpert) {
      add_per_expert(layer, block, old_mixtral);
    } else {
      add_stacked(layer, block);
    }
    if (options_.family != "qwen2_moe") return;
    add_matrix("mlp.shared_expert.gate_proj.weight", layer, weights::kSharedGate, 0, kSharedSize,
               h);
    add_matrix("mlp.shared_expert.up_proj.weight", layer, weights::kSharedUp, 0, kSharedSize, h);
    add_matrix("mlp.shared_expert.down_proj.weight", layer, weights::kSharedDown, 0, h,
               kSharedSize);
    add_matrix("mlp.shared_expert_gate.weight", layer, weights::kSharedExpertGate, 0, 1, h);
  }

  void add_per_expert(int64_t layer, const std::string& block, bool old_mixtral) {
    const int64_t h = options_.hidden_size;
    const int64_t i = options_.intermediate_size;
    for (int64_t expert = 0; expert < options_.num_experts; ++expert) {
      const std::string start = block + "experts." + std::to_string(expert) + ".";
      add_matrix(start + (old_mixtral ? "w1.weight" : "gate_proj.weight"), layer, weights::kGate,
                 expert, i, h);
      add_matrix(start + (old_mixtral ? "w3.weight" : "up_proj.weight"), layer, weights::kUp,
                 expert, i, h);
      add_matrix(start + (old_mixtral ? "w2.weight" : "down_proj.weight"), layer, weights::kDown,
                 expert, h, i);
    }
  }

  void add_stacked(int64_t layer, const std::string& block) {
    const int64_t h = options_.hidden_size;
    const int64_t i = options_.intermediate_size;
    const int64_t e = options_.num_experts;
    const bool across = options_.layout == Layout::kStackedTransposed;
    std::vector<std::byte> gate_up;
    std::vector<std::byte> down;
    for (int64_t expert = 0; expert < e; ++expert) {
      std::vector<std::byte> both =
          tiny_matrix(options_.dtype, layer, weights::kGate, expert, i, h);
      append(both, tiny_matrix(options_.dtype, layer, weights::kUp, expert, i, h));
      append(gate_up, across ? transposed(both, 2 * i, h) : both);
      const auto one = tiny_matrix(options_.dtype, layer, weights::kDown, expert, h, i);
      append(down, across ? transposed(one, h, i) : one);
    }
    using Shape3 = std::vector<int64_t>;
    model_
        .add(prefix_ + block + "experts.gate_up_proj", options_.dtype,
             across ? Shape3{e, h, 2 * i} : Shape3{e, 2 * i, h})
        .bytes = std::move(gate_up);
    model_
        .add(prefix_ + block + "experts.down_proj", options_.dtype,
             across ? Shape3{e, i, h} : Shape3{e, h, i})
        .bytes = std::move(down);
  }

  TinyOptions options_;
  TinyModel model_;
  std::string prefix_;
};

void save(const std::filesystem::path& path, const std::vector<const TinyTensor*>& tensors) {
  SafetensorsWriter writer(path);
  for (const TinyTensor* tensor : tensors)
    writer.declare(tensor->name, tensor->dtype, tensor->shape);
  for (const TinyTensor* tensor : tensors) writer.write(tensor->bytes);
  writer.finish();
}

}  // namespace

TempDir::TempDir() {
  std::string name = (std::filesystem::temp_directory_path() / "conclave-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

TinyTensor& TinyModel::at(const std::string& name) {
  for (TinyTensor& tensor : tensors) {
    if (tensor.name == name) return tensor;
  }
  throw std::out_of_range(name);
}

void TinyModel::drop(const std::string& name) {
  std::erase_if(tensors, [&](const TinyTensor& tensor) { return tensor.name == name; });
}

TinyTensor& TinyModel::add(std::string name, DType dtype, std::vector<int64_t> shape) {
  std::vector<std::byte> zeros(bytes_of(dtype, shape));
  tensors.push_back({std::move(name), dtype, std::move(shape), std::move(zeros)});
  return tensors.back();
}

TinyModel make_tiny_model(const TinyOptions& options) { return Builder(options).build(); }

std::vector<std::byte> tiny_matrix(DType dtype, int64_t layer, WeightId role, int64_t expert,
                                   int64_t rows, int64_t cols) {
  const auto seed =
      static_cast<uint64_t>((layer * 128 + static_cast<int64_t>(role.index())) * 1024 + expert);
  return random_bytes(static_cast<size_t>(rows * cols * byte_size(dtype)), mix(seed + 1));
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string shard_name(size_t shard, size_t shards) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, shards);
  return name;
}

void write_single(const TinyModel& model, const std::filesystem::path& directory) {
  write_text(directory / "config.json", model.config.dump());
  std::vector<const TinyTensor*> tensors;
  for (const TinyTensor& tensor : model.tensors) tensors.push_back(&tensor);
  save(directory / "model.safetensors", tensors);
}

void write_sharded(const TinyModel& model, const std::filesystem::path& directory, size_t shards) {
  write_text(directory / "config.json", model.config.dump());
  nlohmann::json map = nlohmann::json::object();
  for (size_t shard = 0; shard < shards; ++shard) {
    std::vector<const TinyTensor*> tensors;
    for (size_t i = shard; i < model.tensors.size(); i += shards) {
      tensors.push_back(&model.tensors[i]);
      map[model.tensors[i].name] = shard_name(shard, shards);
    }
    save(directory / shard_name(shard, shards), tensors);
  }
  write_text(directory / "model.safetensors.index.json",
             nlohmann::json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
}

std::vector<std::byte> read_matrix(const WeightSource& source, WeightId role, int64_t expert) {
  const WeightInfo info = source.describe(role);
  std::vector<std::byte> bytes(static_cast<size_t>(info.rows * info.cols * byte_size(info.dtype)));
  source.read(role, expert, {0, info.rows, 0, info.cols}, bytes);
  return bytes;
}

std::optional<Error> error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

std::optional<Error> open_error(const std::filesystem::path& directory) {
  return error_of([&] { Checkpoint::open(directory); });
}

}  // namespace conclave::testing
