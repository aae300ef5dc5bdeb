#include "convert/safetensors_model.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <set>

namespace conclave::inline v0::conversion {
namespace {

constexpr const char* kConfig = "config.json";
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// The checkpoint has found the index valid, and that it names every shard.
std::vector<std::string> shard_names(const std::filesystem::path& directory) {
  if (!std::filesystem::exists(directory / kIndex)) return {kSingle};
  const auto index = nlohmann::json::parse(read_whole_file(directory / kIndex));
  std::set<std::string> names;
  for (const auto& [tensor, file] : index.at("weight_map").items()) {
    names.insert(file.get<std::string>());
  }
  return {names.begin(), names.end()};
}

}  // namespace

SafetensorsModel::SafetensorsModel(const std::filesystem::path& directory)
    : SourceModel(Checkpoint::open(directory)), config_text_(read_whole_file(directory / kConfig)) {
  std::vector<std::filesystem::path> paths = {directory / kConfig};
  for (const std::string& name : shard_names(directory)) {
    files_.push_back(SafetensorsFile::open(directory / name));
    paths.push_back(directory / name);
  }
  std::vector<SourceTensor> tensors;
  for (size_t file = 0; file < files_.size(); ++file) {
    const auto infos = files_[file].tensors();
    for (size_t index = 0; index < infos.size(); ++index) {
      tensors.push_back({.name = infos[index].name,
                         .type = std::string(to_string(infos[index].dtype)),
                         .shape = infos[index].shape,
                         .bytes = infos[index].bytes,
                         .file = file,
                         .index = index});
    }
  }
  set(std::move(tensors), std::move(paths));
}

void SafetensorsModel::read(const SourceTensor& tensor, uint64_t offset,
                            std::span<std::byte> destination) const {
  const SafetensorsFile& file = files_[tensor.file];
  file.read(file.tensors()[tensor.index], offset, destination);
}

// Biases stay.
bool SafetensorsModel::goes_with_weights(const SourceTensor& tensor) const {
  return !tensor.name.ends_with(".bias");
}

// The configuration of the result knows one kind of codes.
void SafetensorsModel::require_copyable(const SourceTensor& tensor) const {
  const bool packed = tensor.name.ends_with("_packed") || tensor.name.ends_with("qweight");
  const bool narrow = tensor.shape.size() > 1 && bit_size(*parse_dtype(tensor.type)) < 16;
  if (!narrow && !packed) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = "the tensor stays in codes that the result's configuration would not "
                       "describe",
               .tensor = tensor.name,
               .expected = "values in all that is not converted",
               .found = tensor.type,
               .hint = "convert every layer, from a model whose other weights are values"});
}

std::string SafetensorsModel::shard_name(size_t index, size_t count) const {
  return safetensors_shard_name(index, count);
}

std::string safetensors_shard_name(size_t index, size_t count) {
  if (count == 1) return kSingle;
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

bool SafetensorsModel::holds_tensors(const std::string& file_name) const {
  if (file_name == kIndex) return true;
  for (const SafetensorsFile& file : files_) {
    if (file.path().filename() == file_name) return true;
  }
  return false;
}

}  // namespace conclave::inline v0::conversion
