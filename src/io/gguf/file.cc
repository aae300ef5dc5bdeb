#include "io/gguf/file.h"

#include "core/checked.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cctype>
#include <optional>
#include <string>
#include <utility>

namespace conclave::inline v0::io {
namespace {

constexpr uint64_t kMaxParts = 9'999;
constexpr const char* kCountKey = "split.count";

[[noreturn]] void fail(const std::filesystem::path& path, std::string what, std::string expected,
                       std::string found) {
  throw Error(ErrorCode::kGgufSplit, {.what = std::move(what),
                                      .file = path.string(),
                                      .expected = std::move(expected),
                                      .found = std::move(found),
                                      .hint = "fetch all parts of the model into one directory"});
}

// "name-00001-of-00003.gguf" without "-00001-of-00003.gguf", or nothing.
std::optional<std::string> stem_of_first_part(const std::string& name, uint64_t count) {
  const std::string end = fmt::format("-00001-of-{:05}.gguf", count);
  if (!name.ends_with(end)) return std::nullopt;
  return name.substr(0, name.size() - end.size());
}

class SplitReader {
 public:
  SplitReader(const std::filesystem::path& path, FileAccess access)
      : path_(path), access_(access) {}

  std::vector<GgufFile::Part> read() {
    add(path_);
    const uint64_t count = number_of(parts_.front(), kCountKey).value_or(1);
    if (count == 0 || count > kMaxParts) {
      fail(path_, "split.count is out of range", fmt::format("1 to {}", kMaxParts),
           std::to_string(count));
    }
    if (count > 1) add_others(count);
    return std::move(parts_);
  }

 private:
  void add(const std::filesystem::path& path) {
    File file = File::open(path, {.access = access_});
    GgufHeader header = read_gguf_header(file);
    parts_.push_back({.file = std::move(file), .header = std::move(header)});
  }

  static std::optional<uint64_t> number_of(const GgufFile::Part& part, const char* key) {
    const GgufValue* value = part.header.find_value(key);
    if (value == nullptr) return std::nullopt;
    if (const auto* number = std::get_if<uint64_t>(value)) return *number;
    if (const auto* number = std::get_if<int64_t>(value); number != nullptr && *number >= 0) {
      return static_cast<uint64_t>(*number);
    }
    fail(part.file.name(), fmt::format("{} is no count", key), "an integer of at least 0",
         "a value of another type");
  }

  void add_others(uint64_t count) {
    const std::optional<std::string> stem = stem_of_first_part(path_.filename().string(), count);
    if (!stem) {
      fail(path_, "the name is not that of the first part of a split model",
           fmt::format("a name that ends with -00001-of-{:05}.gguf", count),
           path_.filename().string());
    }
    for (uint64_t i = 1; i < count; ++i) {
      add(path_.parent_path() / fmt::format("{}-{:05}-of-{:05}.gguf", *stem, i + 1, count));
    }
    check_parts(count);
  }

  void check_parts(uint64_t count) const {
    uint64_t tensors = 0;
    for (uint64_t i = 0; i < count; ++i) {
      const GgufFile::Part& part = parts_[i];
      check_number(part, "split.no", i);
      check_number(part, kCountKey, count);
      tensors += part.header.tensors.size();
    }
    check_number(parts_.front(), "split.tensors.count", tensors);
  }

  static void check_number(const GgufFile::Part& part, const char* key, uint64_t expected) {
    const std::optional<uint64_t> found = number_of(part, key);
    if (found == expected) return;
    fail(part.file.name(), fmt::format("{} disagrees with the other parts", key),
         std::to_string(expected), found ? std::to_string(*found) : "no such key");
  }

  const std::filesystem::path& path_;
  FileAccess access_;
  std::vector<GgufFile::Part> parts_;
};

}  // namespace

GgufHeader read_gguf_header(const File& file) {
  return parse_gguf_header(
      [&](uint64_t offset, std::span<std::byte> destination) { file.read(offset, destination); },
      file.bytes(), file.name());
}

GgufFile GgufFile::open(const std::filesystem::path& path, FileAccess access) {
  return GgufFile(SplitReader(path, access).read());
}

GgufFile GgufFile::open_part(const std::filesystem::path& path) {
  File file = File::open(path);
  GgufHeader header = read_gguf_header(file);
  std::vector<Part> parts;
  parts.push_back({.file = std::move(file), .header = std::move(header)});
  return GgufFile(std::move(parts));
}

GgufFile::GgufFile(std::vector<Part> parts) : parts_(std::move(parts)) {
  for (const Part& part : parts_) {
    for (const GgufTensor& tensor : part.header.tensors) {
      names_.add(0, tensor.name, static_cast<uint32_t>(tensors_.size()));
      tensors_.push_back({&part, &tensor});
    }
  }
  const auto twins =
      names_.build([&](uint32_t i) { return std::string_view(tensors_[i].tensor->name); });
  if (!twins) return;
  const Place& second = tensors_[twins->second];
  fail(second.part->file.name(), "two parts hold the tensor " + second.tensor->name,
       "every tensor in one part", tensors_[twins->first].part->file.name());
}

GgufFile::Place GgufFile::find_tensor(std::string_view name) const noexcept {
  const auto found =
      names_.find(0, name, [&](uint32_t i) { return std::string_view(tensors_[i].tensor->name); });
  return found ? tensors_[*found] : Place();
}

void GgufFile::read(const Place& place, uint64_t offset, std::span<std::byte> destination) {
  const GgufTensor& tensor = *place.tensor;
  const auto end = checked_add<uint64_t>(offset, destination.size());
  const auto file_offset = checked_add(tensor.file_offset, offset);
  if (!end || *end > tensor.bytes || !file_offset) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = fmt::format("a read of {} bytes at offset {} leaves the tensor",
                                     destination.size(), offset),
                 .file = place.part->file.name(),
                 .tensor = tensor.name,
                 .limit = fmt::format("{} bytes", tensor.bytes)});
  }
  place.part->file.read(*file_offset, destination);
}

std::span<const std::byte> GgufFile::mapped(const Place& place) noexcept {
  const std::span<const std::byte> mapping = place.part->file.mapping();
  const GgufTensor& tensor = *place.tensor;
  if (tensor.file_offset > mapping.size() || tensor.bytes > mapping.size() - tensor.file_offset) {
    return {};
  }
  return mapping.subspan(tensor.file_offset, tensor.bytes);
}

void GgufFile::release(const Place& place, uint64_t offset, uint64_t bytes) noexcept {
  place.part->file.release(place.tensor->file_offset + offset, bytes);
}

}  // namespace conclave::inline v0::io
