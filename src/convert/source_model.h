// The model that a conversion reads: its checkpoint, its tensors in the order of the files, and
// what tells whether it has changed. A container of tensors is a class of its own.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/convert.h"
#include "conclave/dtype.h"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace conclave::inline v0::conversion {

class ResultFiles;
struct ConversionPlan;
struct ResolvedRequest;

struct SourceTensor {
  std::string name;
  std::string type;  // as the container calls it: "BF16", "Q4_K"
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
  size_t file = 0;  // its place in the container
  size_t index = 0;
};

class SourceModel {
 public:
  // A directory of a Hugging Face model, or a GGUF file. Values in place of a directory's may be
  // null; others must outlive it. Throws as Checkpoint::open, and Error(kInvalidArgument) for
  // values of a GGUF file.
  static std::unique_ptr<SourceModel> open(const std::filesystem::path& path,
                                           const ModelValues* values);
  virtual ~SourceModel() = default;

  virtual ModelContainer container() const = 0;
  // Copies bytes [offset, offset + destination.size()) of the tensor. Throws Error(kFileRead,
  // kFileChanged).
  virtual void read(const SourceTensor& tensor, uint64_t offset,
                    std::span<std::byte> destination) const = 0;
  // Whether a tensor of a converted module's name goes with its weights, such as their shape.
  virtual bool goes_with_weights(const SourceTensor& tensor) const = 0;
  // Throws Error(kUnsupported) for one that the result could not describe as it is.
  virtual void require_copyable(const SourceTensor& tensor) const = 0;
  // The weights of a layer of the checkpoint.
  virtual std::unique_ptr<WeightSource> layer_source(int64_t layer) const {
    return checkpoint_.layer_source(layer);
  }
  // Results lie in files as their sources do. The arguments must outlive the result.
  virtual std::unique_ptr<ResultFiles> result_files(const ConversionPlan& plan,
                                                    const ResolvedRequest& request) const = 0;
  // The name of a shard of the result.
  virtual std::string shard_name(size_t index, size_t count) const = 0;

  // The text of config.json; empty if the container has none.
  virtual std::string_view config_text() const { return {}; }

  const Checkpoint& checkpoint() const { return checkpoint_; }
  const std::filesystem::path& path() const { return checkpoint_.directory(); }
  std::span<const SourceTensor> tensors() const { return tensors_; }
  // Null if there is none of this name.
  const SourceTensor* find(std::string_view name) const;

  // Sizes and times of the files that are read.
  nlohmann::ordered_json identity() const;
  // Throws Error(kFileChanged) if they are no longer those of the begin.
  void check_unchanged() const;

 protected:
  explicit SourceModel(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {}
  // Takes the tensors and the files that are read.
  void set(std::vector<SourceTensor> tensors, std::vector<std::filesystem::path> files);

 private:
  Checkpoint checkpoint_;
  std::vector<std::filesystem::path> files_;
  std::vector<SourceTensor> tensors_;
  std::unordered_map<std::string_view, const SourceTensor*> by_name_;
  nlohmann::ordered_json identity_;
};

// A whole small file. Throws Error(kFileRead).
std::string read_whole_file(const std::filesystem::path& path);

}  // namespace conclave::inline v0::conversion
