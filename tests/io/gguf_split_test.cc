// Models that are split into several GGUF files.
#include "io/gguf/file.h"
#include "io/gguf_bytes.h"
#include "io/io_test_support.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

using io::GgufFile;

std::string part_name(std::string_view stem, size_t number, size_t count) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", stem, number, count);
}

// A model of three parts, as the common writers make them: each says which part it is, of how many,
// and how many tensors all have together.
struct Part {
  std::vector<std::string> split_entries;
  std::vector<std::string> tensors;  // each of one F32

  std::string bytes() const {
    GgufParts parts = {.entries = split_entries};
    for (const std::string& name : tensors) {
      parts.tensors.push_back(gguf_tensor(name, {1}, kTypeF32, parts.data_bytes));
      parts.data_bytes += 32;
    }
    return gguf(parts);
  }
};

std::string number_entry(uint16_t number) { return gguf_entry("split.no", kGgufU16, number); }
std::string count_entry(uint16_t count) { return gguf_entry("split.count", kGgufU16, count); }
std::string total_entry(int32_t total) {
  return gguf_entry("split.tensors.count", kGgufI32, total);
}

std::vector<Part> three_parts() {
  std::vector<Part> parts(3);
  for (uint16_t i = 0; i < 3; ++i) {
    parts[i].split_entries = {number_entry(i), count_entry(3), total_entry(5)};
  }
  parts[0].split_entries.push_back(gguf_entry("general.architecture", kGgufText, gguf_text("a")));
  parts[1].split_entries.push_back(gguf_entry("general.architecture", kGgufText, gguf_text("b")));
  parts[0].tensors = {"a"};
  parts[1].tensors = {"b", "c"};
  parts[2].tensors = {"d", "e"};
  return parts;
}

class GgufSplit : public ::testing::Test {
 protected:
  std::filesystem::path write(const std::vector<Part>& parts,
                              std::string_view stem = "model") const {
    for (size_t i = 0; i < parts.size(); ++i) {
      directory_.write(part_name(stem, i + 1, parts.size()), parts[i].bytes());
    }
    return directory_.path() / part_name(stem, 1, parts.size());
  }

  // Each case is refused as a split, for a reason that names the part `culprit`.
  void expect_refused(const std::vector<Part>& parts, size_t culprit,
                      std::string_view reason) const {
    SCOPED_TRACE(reason);
    const auto path = write(parts);
    std::string what;
    EXPECT_EQ(name_of(code_of([&] { GgufFile::open(path); }, &what)), "kGgufSplit") << what;
    EXPECT_NE(what.find(part_name("model", culprit, parts.size())), std::string::npos) << what;
    EXPECT_NE(what.find(reason), std::string::npos) << what;
  }

  TemporaryDirectory directory_;
};

TEST_F(GgufSplit, ThreeParts_OneModel) {
  const auto path = write(three_parts());
  for (const FileAccess access : kAccessModes) {
    const GgufFile file = GgufFile::open(path, access);
    ASSERT_EQ(file.parts().size(), 3U);
    // The keys are those of the first part.
    EXPECT_EQ(std::get<std::string>(*file.find_value("general.architecture")), "a");
    const std::string second = read_file(directory_.path() / part_name("model", 2, 3));
    const GgufFile::Place place = file.find_tensor("c");
    ASSERT_TRUE(place);
    EXPECT_EQ(place.part, &file.parts()[1]);
    std::string bytes(4, '\0');
    GgufFile::read(place, 0, std::as_writable_bytes(std::span(bytes)));
    EXPECT_EQ(bytes, second.substr(second.size() - 32, 4));
    for (const std::string_view name : {"a", "b", "d", "e"}) EXPECT_TRUE(file.find_tensor(name));
    EXPECT_FALSE(file.find_tensor("f"));
  }
}

TEST_F(GgufSplit, MovedModel_KeepsItsPlaces) {
  GgufFile file = GgufFile::open(write(three_parts()));
  const GgufFile moved = std::move(file);
  EXPECT_EQ(moved.find_tensor("e").part, &moved.parts()[2]);
}

TEST_F(GgufSplit, OddButValid_Opened) {
  for (const std::string_view stem :
       {"", "-00001-of-00003", "a b", "mod\xC3\xA8le.v1.2", "%s{}", "x.gguf", "-"}) {
    SCOPED_TRACE(stem);
    EXPECT_EQ(GgufFile::open(write(three_parts(), stem)).parts().size(), 3U);
  }
  // A first part that holds the keys only.
  std::vector<Part> parts = three_parts();
  parts[1].tensors.push_back(parts[0].tensors[0]);
  parts[0].tensors.clear();
  EXPECT_TRUE(GgufFile::open(write(parts)).find_tensor("a"));
  // Other types of integers.
  parts = three_parts();
  parts[0].split_entries = {gguf_entry("split.no", kGgufI8, int8_t{0}),
                            gguf_entry("split.count", kGgufU64, uint64_t{3}),
                            gguf_entry("split.tensors.count", kGgufU32, 5U)};
  EXPECT_EQ(GgufFile::open(write(parts)).parts().size(), 3U);
  // One part is no split, whatever its name.
  const std::string alone = gguf({.entries = {count_entry(1), number_entry(0)}});
  EXPECT_EQ(GgufFile::open(directory_.write("alone.gguf", alone)).parts().size(), 1U);
}

TEST_F(GgufSplit, PartsThatDisagree_Refused) {
  using Change = void (*)(std::vector<Part>& parts);
  struct Case {
    size_t culprit;  // from 1
    std::string_view reason;
    Change change;
  };
  const std::vector<Case> cases = {
      {1, "split.no", [](auto& p) { p[0].split_entries[0] = number_entry(1); }},
      {2, "split.no", [](auto& p) { p[1].split_entries[0] = number_entry(2); }},
      {2, "split.no", [](auto& p) { p[1] = p[0]; }},
      {2, "split.no", [](auto& p) { std::swap(p[1], p[2]); }},
      {3, "split.no", [](auto& p) { p[2].split_entries[0] = number_entry(65'535); }},
      {3, "split.no",
       [](auto& p) { p[2].split_entries[0] = gguf_entry("split.no", kGgufI32, -2); }},
      {3, "split.no",
       [](auto& p) { p[2].split_entries[0] = gguf_entry("split.no", kGgufF32, 2.F); }},
      {3, "split.no",
       [](auto& p) { p[2].split_entries[0] = gguf_entry("split.no", kGgufText, gguf_text("2")); }},
      {1, "split.no", [](auto& p) { p[0].split_entries.erase(p[0].split_entries.begin()); }},
      {3, "split.no", [](auto& p) { p[2].split_entries.erase(p[2].split_entries.begin()); }},
      {3, "split.no", [](auto& p) { p[2].split_entries.clear(); }},
      {2, "split.count", [](auto& p) { p[1].split_entries[1] = count_entry(2); }},
      {2, "split.count", [](auto& p) { p[1].split_entries.erase(p[1].split_entries.begin() + 1); }},
      {1, "split.tensors.count",
       [](auto& p) { p[0].split_entries.erase(p[0].split_entries.begin() + 2); }},
      {3, "split.count", [](auto& p) { p[2].split_entries[1] = count_entry(4); }},
      {3, "split.count", [](auto& p) { p[2].split_entries[1] = count_entry(0); }},
      {1, "split.tensors.count", [](auto& p) { p[0].split_entries[2] = total_entry(4); }},
      {1, "split.tensors.count", [](auto& p) { p[0].split_entries[2] = total_entry(6); }},
      {1, "split.tensors.count", [](auto& p) { p[0].split_entries[2] = total_entry(-5); }},
      {1, "split.tensors.count", [](auto& p) { p[2].tensors.pop_back(); }},
      {2, "two parts hold the tensor a", [](auto& p) { p[1].tensors[1] = "a"; }},
      {3, "two parts hold the tensor c", [](auto& p) { p[2].tensors[0] = "c"; }},
      {1, "split.count", [](auto& p) { p[0].split_entries[1] = count_entry(0); }},
      {1, "split.count", [](auto& p) { p[0].split_entries[1] = count_entry(10'000); }},
      {1, "split.count",
       [](auto& p) { p[0].split_entries[1] = gguf_entry("split.count", kGgufU64, ~uint64_t{0}); }},
      {1, "split.count",
       [](auto& p) { p[0].split_entries[1] = gguf_entry("split.count", kGgufBoolean, '\1'); }},
      {1, "the name", [](auto& p) { p[0].split_entries[1] = count_entry(4); }},
  };
  for (const Case& test : cases) {
    std::vector<Part> parts = three_parts();
    test.change(parts);
    expect_refused(parts, test.culprit, test.reason);
  }
  fmt::print("S2: {} split models whose parts disagree, all refused\n", cases.size());
}

TEST_F(GgufSplit, OpenedByAnotherName_Refused) {
  const auto first = write(three_parts());
  const std::string bytes = read_file(first);
  std::string what;
  for (const size_t number : {2U, 3U}) {
    const auto path = directory_.path() / part_name("model", number, 3);
    EXPECT_EQ(name_of(code_of([&] { GgufFile::open(path); }, &what)), "kGgufSplit");
    EXPECT_NE(what.find("first part"), std::string::npos) << what;
  }
  for (const std::string_view name :
       {"model.gguf", "model-1-of-3.gguf", "model-00001-of-00004.gguf", "model-00001-of-00003.GGUF",
        "model-00001-of-00003.gguf.part", "model-00001-of-00003", "model_00001-of-00003.gguf",
        "00001-of-00003.gguf", "model-00000-of-00003.gguf"}) {
    SCOPED_TRACE(name);
    const auto path = directory_.write(name, bytes);
    EXPECT_EQ(name_of(code_of([&] { GgufFile::open(path); })), "kGgufSplit");
  }
}

TEST_F(GgufSplit, PartMissingOrDamaged_ErrorNamesIt) {
  const auto first = write(three_parts());
  const auto expect_error = [&](const std::filesystem::path& culprit, std::string_view code) {
    std::string what;
    EXPECT_EQ(name_of(code_of([&] { GgufFile::open(first); }, &what)), code);
    EXPECT_NE(what.find(culprit.string()), std::string::npos) << what;
  };
  const auto third = directory_.path() / part_name("model", 3, 3);
  const std::string bytes = read_file(third);
  directory_.write(third, bytes.substr(0, bytes.size() - 32));
  expect_error(third, "kGgufTruncatedData");
  directory_.write(third, "GGML" + bytes.substr(4));
  expect_error(third, "kGgufMagic");
  directory_.write(third, "");
  expect_error(third, "kGgufTruncatedHeader");
  std::filesystem::remove(third);
  expect_error(third, "kFileNotFound");
  std::filesystem::create_directory(third);
  expect_error(third, "kFileNotRegular");
}

}  // namespace
}  // namespace conclave::testing
