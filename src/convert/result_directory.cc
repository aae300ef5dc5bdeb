#include "convert/result_directory.h"

#include "io/new_file.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <system_error>

namespace conclave::inline v0::conversion {
namespace {

namespace fs = std::filesystem;

// Written by the conversion, or true of the source's tensors only.
constexpr std::array<std::string_view, 8> kReplaced = {
    "config.json",       "conclave.manifest.json",      "quantize_config.json",
    "quant_config.json", "hf_quant_config.json",        "conversion.json",
    "conversion.html",   "model.safetensors.index.json"};
// Endings of files with weights.
constexpr std::array<std::string_view, 10> kWeightFiles = {
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".npz", ".partial"};

[[noreturn]] void fail(std::string what, const fs::path& path, std::string found,
                       std::string hint = {}) {
  throw Error(ErrorCode::kFileWrite, {.what = std::move(what),
                                      .file = path.string(),
                                      .found = std::move(found),
                                      .hint = std::move(hint)});
}

void check(const std::error_code& problem, const char* what, const fs::path& path) {
  if (problem) fail(what, path, problem.message());
}

bool is_within(const fs::path& path, const fs::path& directory) {
  const auto [end, unused] = std::ranges::mismatch(directory, path);
  return end == directory.end();
}

// "out/" and "out" are one directory.
fs::path without_slash(const fs::path& path) {
  const fs::path normal = fs::absolute(path).lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

void check_replaceable(const fs::path& path) {
  std::error_code problem;
  const bool model =
      fs::is_directory(path, problem) &&
      (fs::exists(path / "config.json", problem) || fs::exists(path / kReportFile, problem));
  if (model || fs::is_empty(path, problem)) return;
  fail("the destination is no model that could be replaced", path, "something else",
       "choose another name");
}

bool is_weight_file(const std::string& name) {
  return std::ranges::any_of(kWeightFiles,
                             [&](std::string_view ending) { return name.ends_with(ending); });
}

// A model of the Hugging Face cache links to files beside its snapshots.
fs::path root_of(const fs::path& directory) {
  const fs::path real = fs::canonical(directory);
  const fs::path snapshots = real.parent_path();
  return snapshots.filename() == "snapshots" ? snapshots.parent_path() : real;
}

}  // namespace

ResultDirectory::ResultDirectory(const fs::path& destination, const fs::path& source,
                                 ExistingModel existing)
    : final_(without_slash(destination)), unfinished_(final_.string() + ".partial") {
  std::error_code problem;
  const fs::path real = fs::weakly_canonical(final_, problem);
  const fs::path real_source = fs::canonical(source, problem);
  if (is_within(real_source, real)) {
    fail("the destination is the model itself, or holds it", final_, source.string());
  }
  const bool replace = existing == ExistingModel::kReplace;
  if (fs::exists(fs::symlink_status(final_, problem))) {
    if (!replace) {
      fail("the destination exists", final_, "a file or directory",
           "choose another, or ExistingModel::kReplace to replace a model");
    }
    check_replaceable(final_);
  }
  if (replace) {
    fs::remove_all(unfinished_, problem);
    check(problem, "cannot remove the unfinished conversion", unfinished_);
  }
  make_unfinished();
}

void ResultDirectory::make_unfinished() {
  std::error_code problem;
  for (fs::path path = unfinished_; !fs::exists(fs::symlink_status(path, problem));
       path = path.parent_path()) {
    made_.push_back(path);
  }
  fs::create_directories(unfinished_, problem);
  if (!problem) return;
  remove_empty_parents();
  check(problem, "cannot make the directory", unfinished_);
}

void ResultDirectory::require_room(uint64_t bytes) const {
  std::error_code problem;
  const fs::space_info space = fs::space(unfinished_, problem);
  if (problem || space.available >= bytes) return;
  throw Error(ErrorCode::kFileWrite, {.what = "too little room on the disk",
                                      .file = unfinished_.string(),
                                      .expected = fmt::format("{} bytes", bytes),
                                      .found = fmt::format("{} bytes", space.available)});
}

void ResultDirectory::remove_all_but(const std::vector<std::string>& names) const {
  for (const fs::directory_entry& entry : fs::directory_iterator(unfinished_)) {
    if (std::ranges::find(names, entry.path().filename().string()) != names.end()) continue;
    std::error_code problem;
    fs::remove_all(entry.path(), problem);
    check(problem, "cannot remove what an earlier conversion left", entry.path());
  }
}

std::vector<std::string> ResultDirectory::copy_other_files(
    const fs::path& source, const std::function<bool(const std::string&)>& holds_tensors) const {
  const fs::path root = root_of(source);
  std::vector<std::string> left_out;
  for (const fs::directory_entry& entry : fs::directory_iterator(source)) {
    const std::string name = entry.path().filename().string();
    if (holds_tensors(name) || std::ranges::find(kReplaced, name) != kReplaced.end()) {
      continue;
    }
    if (!entry.is_regular_file() || is_weight_file(name)) {
      left_out.push_back(name);
      continue;
    }
    const fs::path real = fs::canonical(entry.path());
    if (!is_within(real, root)) {
      throw Error(ErrorCode::kPathEscape, {.what = "a link leaves the model's directory",
                                           .file = entry.path().string(),
                                           .found = real.string()});
    }
    std::error_code problem;
    fs::copy_file(real, unfinished_ / name, fs::copy_options::overwrite_existing, problem);
    check(problem, "cannot copy the file", unfinished_ / name);
  }
  std::ranges::sort(left_out);
  return left_out;
}

void ResultDirectory::discard() const {
  std::error_code ignored;
  fs::remove_all(unfinished_, ignored);
  remove_empty_parents();
}

// Whoever has written beside the result meanwhile keeps the directory.
void ResultDirectory::remove_empty_parents() const {
  std::error_code ignored;
  for (const fs::path& path : made_) fs::remove(path, ignored);
}

void ResultDirectory::publish() const {
  std::error_code problem;
  const fs::path replaced = final_.string() + ".replaced";
  const bool exists = fs::exists(fs::symlink_status(final_, problem));
  if (exists) {
    fs::remove_all(replaced, problem);
    fs::rename(final_, replaced, problem);
    check(problem, "cannot move the model that is replaced", final_);
  }
  fs::rename(unfinished_, final_, problem);
  check(problem, "cannot give the directory its name", final_);
  if (exists) fs::remove_all(replaced, problem);
}

void write_durably(const fs::path& path, std::string_view text) {
  io::NewFile file(path);
  file.begin();
  file.write(std::as_bytes(std::span(text)));
  file.publish();
}

}  // namespace conclave::inline v0::conversion
