// Makes small checkpoints in the test: every family, every layout, every element known.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/error.h"
#include "conclave/weights.h"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace conclave::testing {

// A temporary directory that is removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

enum class Layout { kPerExpert, kStacked, kStackedTransposed };

struct TinyOptions {
  std::string family = "qwen3_moe";
  Layout layout = Layout::kPerExpert;
  DType dtype = DType::kBF16;
  std::string trunk = "model.";
  int64_t num_experts = 5;
  int64_t hidden_size = 10;
  int64_t intermediate_size = 6;
};

struct TinyTensor {
  std::string name;
  DType dtype = DType::kBF16;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

struct TinyModel {
  nlohmann::json config;
  std::vector<TinyTensor> tensors;
  std::vector<int64_t> moe_layers;

  TinyTensor& at(const std::string& name);
  void drop(const std::string& name);
  TinyTensor& add(std::string name, DType dtype, std::vector<int64_t> shape);
};

// Makes three layers; the middle one is dense if the family has dense layers.
TinyModel make_tiny_model(const TinyOptions& options);
// The matrix as make_tiny_model stores it, in canonical order [rows, cols].
std::vector<std::byte> tiny_matrix(DType dtype, int64_t layer, WeightId role, int64_t expert,
                                   int64_t rows, int64_t cols);

// Write config.json and model.safetensors, or shards with an index.
void write_single(const TinyModel& model, const std::filesystem::path& directory);
void write_sharded(const TinyModel& model, const std::filesystem::path& directory, size_t shards);
void write_text(const std::filesystem::path& path, const std::string& text);
std::string shard_name(size_t shard, size_t shards);

std::vector<std::byte> read_matrix(const WeightSource& source, WeightId role, int64_t expert);

// Returns the Error that `call` throws, if any.
std::optional<Error> error_of(const std::function<void()>& call);
std::optional<Error> open_error(const std::filesystem::path& directory);

inline const std::vector<std::string> kFamilies = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"};

}  // namespace conclave::testing
