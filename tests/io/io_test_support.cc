#include "io/io_test_support.h"

#include <fmt/format.h>

#include <array>
#include <fstream>
#include <iterator>
#include <malloc.h>
#include <stdlib.h>
#include <system_error>

namespace conclave::testing {
namespace {

// Returns the bytes that a "VmHWM:   1234 kB" line states.
size_t status_bytes(std::string_view field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field)) return std::stoull(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

}  // namespace

TemporaryDirectory::TemporaryDirectory() {
  std::string name = (std::filesystem::temp_directory_path() / "conclave-io-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = name;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::filesystem::path TemporaryDirectory::write(const std::filesystem::path& name,
                                                std::string_view content) const {
  const std::filesystem::path path = path_ / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string());
  return path;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string length_prefix(uint64_t bytes) {
  std::string prefix(8, '\0');
  for (size_t i = 0; i < prefix.size(); ++i) {
    prefix[i] = static_cast<char>((bytes >> (8 * i)) & 0xFF);
  }
  return prefix;
}

std::string safetensors(std::string_view header, size_t data_bytes) {
  std::string file = length_prefix(header.size()) + std::string(header);
  for (size_t i = 0; i < data_bytes; ++i) file += static_cast<char>(i * 37 + 11);
  return file;
}

std::string entry(std::string_view name, std::string_view dtype, std::string_view shape,
                  std::string_view offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

std::string large_header(size_t count) {
  std::string header = "{";
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) header += ',';
    header +=
        entry(fmt::format("model.layers.{}.mlp.experts.{}.down_proj.weight", i / 128, i % 128),
              "BF16", "[2,1]", fmt::format("[{},{}]", 4 * i, 4 * i + 4));
  }
  return header + '}';
}

std::optional<ErrorCode> code_of(const std::function<void()>& body, std::string* what) {
  try {
    body();
    return std::nullopt;
  } catch (const Error& error) {
    if (what != nullptr) *what = error.what();
    return error.code();
  }
}

std::string access_name(const ::testing::TestParamInfo<FileAccess>& param) {
  switch (param.param) {
    case FileAccess::kAuto:
      return "auto";
    case FileAccess::kMap:
      return "map";
    case FileAccess::kRead:
      return "read";
  }
  return "unknown";
}

std::string name_of(std::optional<ErrorCode> code) {
  return code ? std::string(to_string(*code)) : "no error";
}

size_t resident_bytes() { return status_bytes("VmRSS:"); }
size_t peak_resident_bytes() { return status_bytes("VmHWM:"); }
void reset_peak_resident() {
  malloc_trim(0);  // memory that malloc keeps for later would hide the next growth
  std::ofstream("/proc/self/clear_refs") << "5";
}

}  // namespace conclave::testing
