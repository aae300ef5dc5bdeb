#include "convert/source_model.h"

#include "convert/drawn_model.h"
#include "convert/gguf_model.h"
#include "convert/request.h"
#include "convert/safetensors_model.h"

#include "conclave/error.h"

#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

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

std::unique_ptr<SourceModel> SourceModel::open(const std::filesystem::path& path,
                                               const ModelValues* values) {
  if (path.empty()) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "the model has no name",
                                              .tensor = "source",
                                              .expected = "a model directory or a GGUF file",
                                              .found = "an empty path"});
  }
  if (values == nullptr) {
    const bool is_gguf = container_of(path) == ModelContainer::kGguf;
    if (is_gguf) return std::make_unique<GgufModel>(Checkpoint::open(path).directory());
    return std::make_unique<SafetensorsModel>(path);
  }
  std::error_code ignored;
  const bool is_file = std::filesystem::is_regular_file(path, ignored);
  if (!is_file) return std::make_unique<DrawnModel>(path, *values);
  throw Error(ErrorCode::kInvalidArgument, {.what = "values stand in place of a directory's alone",
                                            .file = path.string(),
                                            .tensor = "values",
                                            .found = "a file"});
}

void SourceModel::set(std::vector<SourceTensor> tensors, std::vector<std::filesystem::path> files) {
  tensors_ = std::move(tensors);
  files_ = std::move(files);
  for (const SourceTensor& tensor : tensors_) by_name_.emplace(tensor.name, &tensor);
  identity_ = identity();
}

const SourceTensor* SourceModel::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

nlohmann::ordered_json SourceModel::identity() const {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const std::filesystem::path& file : files_) files.push_back(identity_of(file));
  return files;
}

void SourceModel::check_unchanged() const {
  const nlohmann::ordered_json now = identity();
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] == identity_[i]) continue;
    throw Error(ErrorCode::kFileChanged, {.what = "the model changed while it was converted",
                                          .file = files_[i].string(),
                                          .expected = identity_[i].dump(),
                                          .found = now[i].dump(),
                                          .hint = "convert it anew, with ExistingModel::kReplace"});
  }
}

}  // namespace conclave::inline v0::conversion
