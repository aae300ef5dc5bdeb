#include "convert/source_model.h"

#include "conclave/error.h"

#include <fstream>
#include <set>
#include <sstream>
#include <system_error>

namespace conclave::tool {
namespace {

constexpr const char* kConfig = "config.json";
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

Checkpoint open_directory(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "a model in one file has no configuration and no names to convert to",
                 .file = path.string(),
                 .expected = "a Hugging Face model directory"});
  }
  return Checkpoint::open(path);
}

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

nlohmann::ordered_json identity_of(const std::filesystem::path& path) {
  std::error_code problem;
  const uintmax_t bytes = std::filesystem::file_size(path, problem);
  const auto time = std::filesystem::last_write_time(path, problem);
  if (problem) {
    throw Error(ErrorCode::kFileRead, {.what = "a file of the model cannot be looked at",
                                       .file = path.string(),
                                       .found = problem.message()});
  }
  return {{"file", path.filename().string()},
          {"bytes", bytes},
          {"time", time.time_since_epoch().count()}};
}

}  // namespace

std::string read_whole_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw Error(ErrorCode::kFileRead, {.what = "cannot read the file", .file = path});
  return text.str();
}

SourceModel::SourceModel(const std::filesystem::path& directory)
    : checkpoint_(open_directory(directory)), config_text_(read_whole_file(directory / kConfig)) {
  for (const std::string& name : shard_names(directory)) {
    files_.push_back(SafetensorsFile::open(directory / name));
  }
  for (const SafetensorsFile& file : files_) {
    for (const TensorInfo& info : file.tensors()) tensors_.push_back({&file, &info});
  }
  for (const SourceTensor& tensor : tensors_) by_name_.emplace(tensor.info->name, &tensor);
  identity_ = identity();
}

const SourceTensor* SourceModel::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

bool SourceModel::holds_tensors(const std::string& file_name) const {
  if (file_name == kIndex) return true;
  for (const SafetensorsFile& file : files_) {
    if (file.path().filename() == file_name) return true;
  }
  return false;
}

nlohmann::ordered_json SourceModel::identity() const {
  nlohmann::ordered_json files = {identity_of(directory() / kConfig)};
  for (const SafetensorsFile& file : files_) files.push_back(identity_of(file.path()));
  return files;
}

void SourceModel::check_unchanged() const {
  const nlohmann::ordered_json now = identity();
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] == identity_[i]) continue;
    throw Error(ErrorCode::kFileChanged,
                {.what = "the model changed while it was converted",
                 .file = (directory() / now[i]["file"].get<std::string>()).string(),
                 .expected = identity_[i].dump(),
                 .found = now[i].dump(),
                 .hint = "convert it anew, with --force"});
  }
}

}  // namespace conclave::tool
