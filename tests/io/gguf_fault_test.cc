// Bars S7 and S8 for GGUF: truncated files, failing reads, and files that change while they are
// read.
#include "io/fault_support.h"
#include "io/gguf/file.h"
#include "io/gguf_bytes.h"
#include "io/io_test_support.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

namespace conclave::testing {
namespace {

using io::GgufFile;

std::string load_all(io::File opened) {
  io::GgufHeader header = io::read_gguf_header(opened);
  const GgufFile::Part part = {std::move(opened), std::move(header)};
  std::string all;
  for (const io::GgufTensor& tensor : part.header.tensors) {
    std::string bytes(tensor.bytes, '\0');
    GgufFile::read({&part, &tensor}, 0, std::as_writable_bytes(std::span(bytes)));
    all += bytes;
  }
  return all;
}

constexpr size_t kDataBytes = 3 * 288 + 32 + 128;

// A small file with keys of every kind and several types of tensors.
GgufParts sample_parts() {
  return {
      .entries = {gguf_entry("general.architecture", kGgufText, gguf_text("tiny")),
                  gguf_entry("general.alignment", kGgufU32, 32U),
                  gguf_entry("flag", kGgufBoolean, uint8_t{1}), gguf_entry("scale", kGgufF64, 0.5),
                  gguf_entry("numbers", kGgufList, gguf_array(kGgufI16, 3, "abcdef")),
                  gguf_entry("words", kGgufList,
                             gguf_array(kGgufText, 2, gguf_text("a") + gguf_text("bc")))},
      .tensors = {gguf_tensor("blocks", {512, 3}, kTypeQ4K, 0),
                  gguf_tensor("vector", {5}, kTypeF32, 864),
                  gguf_tensor("codes", {32, 2, 2}, kTypeI8, 896)},
      .data_bytes = kDataBytes};
}

// Codes that a cut within the header may give: what is missing is a field, or what a count or a
// length claims.
const std::set<std::string> kCutCodes = {"kGgufTruncatedHeader", "kGgufCount", "kGgufString",
                                         "kGgufArray"};

TEST(GgufFaults, CutAnywhere_TypedErrorNamingTheFile) {
  const TemporaryDirectory directory;
  const std::string file = gguf(sample_parts());
  const size_t header_bytes = gguf_header(sample_parts()).size();
  std::vector<size_t> cuts;
  for (size_t i = 0; i < file.size() - kDataBytes; ++i) cuts.push_back(i);
  for (size_t i = 0; i < 64; ++i) cuts.push_back(file.size() - kDataBytes + i * kDataBytes / 64);
  cuts.push_back(file.size() - 1);
  std::map<std::string, int> codes;
  for (const size_t cut : cuts) {
    const auto path = directory.write("cut.gguf", std::string_view(file).substr(0, cut));
    for (const FileAccess access : kBothModes) {
      std::string what;
      const auto code = code_of([&] { load_all(io::File::open(path, {.access = access})); }, &what);
      if (cut < header_bytes) {
        EXPECT_TRUE(kCutCodes.contains(name_of(code))) << cut << name_of(code);
      } else {
        EXPECT_EQ(name_of(code), "kGgufTruncatedData") << cut;
      }
      EXPECT_NE(what.find(path.string()), std::string::npos) << what;
      EXPECT_EQ(name_of(code_of([&] { GgufFile::open(path, access); })), name_of(code));
      ++codes[name_of(code)];
    }
  }
  fmt::print("S7: {} cuts in 2 access modes, {} distinct codes, signals 0\n", cuts.size(),
             codes.size());
}

TEST(GgufFaults, KthReadFails_TypedErrorOrRetried) {
  const TemporaryDirectory directory;
  GgufParts parts = sample_parts();
  // The header takes several reads.
  parts.entries.push_back(
      gguf_entry("long", kGgufText, gguf_text(std::string(size_t{1} << 20, 'x'))));
  const auto path = directory.write("model.gguf", gguf(parts));
  const size_t cases = expect_read_faults_handled(path, load_all);
  EXPECT_GE(cases, 64U);
  fmt::print("S7: {} injected read faults, signals 0\n", cases);
}

TEST(GgufFaults, ModifiedDuringLoad_TypedErrorOrOriginalBytes) {
  const std::string start = gguf({.tensors = {gguf_tensor("w", {kChangingBytes}, kTypeI8, 0)}});
  const ChangeCounts counts = expect_changes_noticed(
      [&](char value) { return start + std::string(kChangingBytes, value); },
      [](const std::filesystem::path& path, FileAccess access) -> ReadTensor {
        const auto file = std::make_shared<const GgufFile>(GgufFile::open(path, access));
        return [file](uint64_t offset, std::span<std::byte> destination) {
          GgufFile::read(file->find_tensor("w"), offset, destination);
        };
      });
  fmt::print("S8: {} modified files, {} refused loads, mixed loads {}, signals 0\n", counts.files,
             counts.refused_loads, counts.mixed_loads);
}

// Every read of a header sees the file that was opened, so that no header is put together from two.
TEST(GgufFaults, ChangedBetweenReadsOfTheHeader_Refused) {
  const TemporaryDirectory directory;
  const std::string file = gguf(large_gguf(20'000));
  for (int change = 1; change < 4; ++change) {
    for (const auto how : {"truncate", "append", "rewrite"}) {
      SCOPED_TRACE(fmt::format("{} before read {}", how, change));
      const auto path = directory.write("model.gguf", file);
      int calls = 0;
      const io::ReadFunction read = [&](int fd, void* buffer, size_t bytes, off_t offset) {
        if (calls++ == change) {
          if (how == std::string_view("truncate")) std::filesystem::resize_file(path, 100);
          if (how == std::string_view("append")) {
            std::filesystem::resize_file(path, file.size() + 1);
          }
          if (how == std::string_view("rewrite")) {
            std::fstream(path, std::ios::binary | std::ios::in | std::ios::out) << file;
          }
        }
        return pread(fd, buffer, bytes, offset);
      };
      EXPECT_EQ(name_of(code_of([&] { load_all(io::File::open(path, {.read = read})); })),
                "kFileChanged");
      EXPECT_GT(calls, change);
    }
  }
}

}  // namespace
}  // namespace conclave::testing
