// Bars S7 and S8: truncated files, failing reads, and files that change while they are read.
#include "io/fault_support.h"
#include "io/io_test_support.h"
#include "io/safetensors_open.h"

#include "conclave/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

// Opens the file and loads every tensor; returns the bytes of all of them together.
std::string load_all(io::File opened) {
  const SafetensorsFile file = io::open_safetensors(std::move(opened));
  std::string all;
  for (const TensorInfo& tensor : file.tensors()) {
    const Tensor loaded = file.load(tensor.name);
    all.append(loaded.as<char>(), loaded.size_bytes());
  }
  return all;
}

// A small file with metadata, an empty tensor and several dtypes.
std::string sample_file() {
  const std::string header = R"({"__metadata__":{"format":"pt"},)" +
                             entry("w", "F32", "[4,8]", "[0,128]") + "," +
                             entry("empty", "F16", "[0,4]", "[128,128]") + "," +
                             entry("b", "BF16", "[64]", "[128,256]") + "}";
  return safetensors(header, 256);
}

TEST(SafetensorsFaults, CutAnywhere_TypedErrorNamingTheFile) {
  const TemporaryDirectory directory;
  const std::string file = sample_file();
  const size_t data_begin = file.size() - 256;
  std::vector<size_t> cuts;
  for (size_t i = 0; i < data_begin; ++i) cuts.push_back(i);
  for (size_t i = 0; i < 64; ++i) cuts.push_back(data_begin + i * 4);
  std::map<std::string, int> codes;
  for (const size_t cut : cuts) {
    const auto path = directory.write("cut.safetensors", std::string_view(file).substr(0, cut));
    for (const FileAccess access : kBothModes) {
      std::string what;
      const auto code = code_of([&] { load_all(io::File::open(path, {.access = access})); }, &what);
      const std::string expected = cut < 8            ? "kSafetensorsTooShort"
                                   : cut < data_begin ? "kSafetensorsHeaderTruncated"
                                                      : "kSafetensorsTruncatedData";
      EXPECT_EQ(name_of(code), expected) << cut;
      EXPECT_NE(what.find(path.string()), std::string::npos) << what;
      EXPECT_NE(what.find(fmt::format("{} bytes", cut)), std::string::npos) << what;
      ++codes[name_of(code)];
    }
  }
  fmt::print("S7: {} cuts in 2 access modes, {} distinct codes, signals 0\n", cuts.size(),
             codes.size());
}

TEST(SafetensorsFaults, KthReadFails_TypedErrorOrRetried) {
  const TemporaryDirectory directory;
  const auto path = directory.write("model.safetensors", sample_file());
  const size_t cases = expect_read_faults_handled(path, load_all);
  EXPECT_GE(cases, 32U);
  fmt::print("S7: {} injected read faults, signals 0\n", cases);
}

TEST(SafetensorsFaults, ModifiedDuringLoad_TypedErrorOrOriginalBytes) {
  const std::string header = fmt::format(
      "{{{}}}",
      entry("w", "U8", fmt::format("[{}]", kChangingBytes), fmt::format("[0,{}]", kChangingBytes)));
  const ChangeCounts counts = expect_changes_noticed(
      [&](char value) { return safetensors(header) + std::string(kChangingBytes, value); },
      [](const std::filesystem::path& path, FileAccess access) -> ReadTensor {
        const auto file =
            std::make_shared<const SafetensorsFile>(SafetensorsFile::open(path, access));
        return [file](uint64_t offset, std::span<std::byte> destination) {
          file->read(file->tensors()[0], offset, destination);
        };
      });
  fmt::print("S8: {} modified files, {} refused loads, mixed loads {}, signals 0\n", counts.files,
             counts.refused_loads, counts.mixed_loads);
}

}  // namespace
}  // namespace conclave::testing
