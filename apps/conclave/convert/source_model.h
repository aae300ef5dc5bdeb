// The directory that a conversion reads: its checkpoint, its tensors in the order of the files, and
// what tells whether it has changed.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/safetensors.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace conclave::tool {

struct SourceTensor {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* info = nullptr;
};

class SourceModel {
 public:
  // Throws as Checkpoint::open, and Error(kUnsupported) for a GGUF file.
  explicit SourceModel(const std::filesystem::path& directory);

  const Checkpoint& checkpoint() const { return checkpoint_; }
  const std::filesystem::path& directory() const { return checkpoint_.directory(); }
  const std::string& config_text() const { return config_text_; }
  std::span<const SourceTensor> tensors() const { return tensors_; }
  // Null if there is none of this name.
  const SourceTensor* find(std::string_view name) const;
  // Whether a file of the directory holds tensors or says where they are.
  bool holds_tensors(const std::string& file_name) const;

  // Sizes and times of the files that are read.
  nlohmann::ordered_json identity() const;
  // Throws Error(kFileChanged) if they are no longer those of the begin.
  void check_unchanged() const;

 private:
  Checkpoint checkpoint_;
  std::string config_text_;
  std::vector<SafetensorsFile> files_;
  std::vector<SourceTensor> tensors_;
  std::unordered_map<std::string_view, const SourceTensor*> by_name_;
  nlohmann::ordered_json identity_;
};

// A whole small file. Throws Error(kFileRead).
std::string read_whole_file(const std::filesystem::path& path);

}  // namespace conclave::tool
