// Bars S2 and S4: hand-made GGUF files, each with the only code it may be refused with.
#include "io/gguf/file.h"
#include "io/gguf/types.h"
#include "io/gguf_bytes.h"
#include "io/gguf_malformed.h"
#include "io/io_test_support.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

using enum ErrorCode;

TEST(GgufConformance, Malformed_RefusedWithItsOwnCode) {
  const TemporaryDirectory directory;
  GgufCases cases;
  add_malformed_entries(cases);
  add_malformed_tensors(cases);
  std::set<ErrorCode> codes;
  size_t false_accepts = 0;
  for (const MalformedGguf& test : cases) {
    SCOPED_TRACE(test.name);
    std::string what;
    const auto in_memory = code_of([&] { parse_gguf(test.file); }, &what);
    EXPECT_EQ(name_of(in_memory), to_string(test.code)) << what;
    EXPECT_NE(what.find("model.gguf"), std::string::npos) << what;
    const auto path = directory.write("case.gguf", test.file);
    for (const FileAccess access : {FileAccess::kMap, FileAccess::kRead}) {
      const auto on_disk = code_of([&] { io::GgufFile::open(path, access); });
      EXPECT_EQ(name_of(on_disk), to_string(test.code));
      if (!on_disk) ++false_accepts;
    }
    if (!in_memory) ++false_accepts;
    codes.insert(test.code);
  }
  EXPECT_GE(cases.size(), 75U);
  // All but kGgufSplit, which takes several files.
  for (auto code = static_cast<int>(kGgufMagic); code < static_cast<int>(kGgufSplit); ++code) {
    EXPECT_TRUE(codes.contains(static_cast<ErrorCode>(code))) << code;
  }
  fmt::print("S2: {} malformed files, {} distinct codes, false accepts {}\n", cases.size(),
             codes.size(), false_accepts);
}

TEST(GgufConformance, Version_SaysWhetherTheFileIsBigEndian) {
  for (const uint32_t version : {0U, 1U, 4U, 0x0100'0000U, 0x0200'0000U, 0x0300'0000U}) {
    std::string what;
    code_of([&] { parse_gguf(gguf({.version = version})); }, &what);
    EXPECT_EQ(what.find("big-endian") != std::string::npos, version > 4) << what;
  }
}

TEST(GgufConformance, MoreTensorsThanTheLimit_Refused) {
  const std::string header = gguf_header({.num_tensors = 1'000'001});
  EXPECT_EQ(name_of(code_of([&] {
              io::parse_gguf_header(reader_of(header), uint64_t{1} << 40, "model.gguf");
            })),
            "kGgufCount");
}

struct ValidCase {
  std::string name;
  GgufParts parts;
};

void add_valid_headers(std::vector<ValidCase>& cases) {
  const std::string f32 = gguf_tensor("a", {8}, kTypeF32, 0);
  const auto entries = [&](std::string name, std::vector<std::string> list) {
    cases.push_back(
        {std::move(name), {.entries = std::move(list), .tensors = {f32}, .data_bytes = 32}});
  };
  cases.push_back({"nothing", {}});
  cases.push_back({"version_2", {.version = 2, .tensors = {f32}, .data_bytes = 32}});
  cases.push_back({"no_keys", {.tensors = {f32}, .data_bytes = 32}});
  cases.push_back({"no_tensors", {.entries = {gguf_entry("k", kGgufU8, "x")}}});
  entries("empty_string", {gguf_entry("k", kGgufText, gguf_text(""))});
  entries("value_not_utf8", {gguf_entry("k", kGgufText, gguf_text("\xC3("))});
  entries("value_with_a_nul", {gguf_entry("k", kGgufText, gguf_text(std::string(3, '\0')))});
  entries(
      "elements_not_utf8",
      {gguf_entry("tokenizer.ggml.tokens", kGgufList,
                  gguf_array(kGgufText, 3, gguf_text("\xFF") + gguf_text("") + gguf_text("\n")))});
  entries("empty_arrays", {gguf_entry("k", kGgufList, gguf_array(kGgufF32, 0)),
                           gguf_entry("l", kGgufList, gguf_array(kGgufText, 0)),
                           gguf_entry("m", kGgufList, gguf_array(kGgufBoolean, 0))});
  entries("long_arrays",
          {gguf_entry("k", kGgufList, gguf_array(kGgufU8, 65'537, std::string(65'537, 'x'))),
           gguf_entry("l", kGgufList, gguf_array(kGgufF64, 65'537, std::string(8 * 65'537, 'x')))});
  entries("many_words",
          {gguf_entry("k", kGgufList, gguf_array(kGgufText, 100'000, std::string(800'000, '\0')))});
  entries("long_string",
          {gguf_entry("k", kGgufText, gguf_text(std::string(size_t{1} << 20, 'x')))});
  entries("longest_key", {gguf_entry(std::string(65'535, 'k'), kGgufU8, "x")});
  entries("key_unicode", {gguf_entry("schl\xC3\xBCssel \xF0\x9F\x98\x80", kGgufU8, "x")});
  entries("keys_that_differ_in_case",
          {gguf_entry("k", kGgufU8, "x"), gguf_entry("K", kGgufU8, "x")});
  entries("key_named_like_a_tensor", {gguf_entry("a", kGgufU8, "x")});
  entries("nan_and_infinity",
          {gguf_entry("k", kGgufF32, std::numeric_limits<float>::quiet_NaN()),
           gguf_entry("l", kGgufF64, -std::numeric_limits<double>::infinity())});
  entries("alignment_in_8_bits", {gguf_entry("general.alignment", kGgufU8, "\x20")});
}

void add_valid_layouts(std::vector<ValidCase>& cases) {
  const auto tensors = [&](std::string name, std::vector<std::string> list, size_t data_bytes) {
    cases.push_back({std::move(name), {.tensors = std::move(list), .data_bytes = data_bytes}});
  };
  tensors("rank_0", {gguf_tensor("a", {}, kTypeF32, 0)}, 4);
  tensors("rank_4", {gguf_tensor("a", {2, 1, 2, 1}, kTypeF32, 0)}, 16);
  tensors("last_tensor_unpadded", {gguf_tensor("a", {3}, kTypeI8, 0)}, 3);
  tensors("last_tensor_padded", {gguf_tensor("a", {3}, kTypeI8, 0)}, 32);
  tensors("last_tensor_padded_in_part", {gguf_tensor("a", {3}, kTypeI8, 0)}, 17);
  tensors("name_longest", {gguf_tensor(std::string(64, 'n'), {1}, kTypeF32, 0)}, 4);
  tensors("name_unicode", {gguf_tensor("gewicht \xE2\x82\xAC", {1}, kTypeF32, 0)}, 4);
  tensors("names_against_their_order",
          {gguf_tensor("b", {1}, kTypeF32, 0), gguf_tensor("a", {1}, kTypeF32, 32)}, 36);
  for (const uint32_t alignment : {8U, 16U, 64U, 4096U, 65'536U}) {
    cases.push_back({fmt::format("alignment_{}", alignment),
                     {.entries = {gguf_entry("general.alignment", kGgufU32, alignment)},
                      .tensors = {gguf_tensor("a", {3}, kTypeI8, 0),
                                  gguf_tensor("b", {1}, kTypeF32, alignment)},
                      .data_bytes = alignment + 4,
                      .alignment = alignment}});
  }
  GgufParts all;
  for (uint32_t id = 0; id < 64; ++id) {
    const io::GgufType* type = io::find_gguf_type(id);
    if (type == nullptr) continue;
    all.tensors.push_back(gguf_tensor(fmt::format("t{}", id),
                                      {2 * uint64_t{type->block_elements}, 3}, id, all.data_bytes));
    all.data_bytes += (6 * type->block_bytes + 31) / 32 * 32;
  }
  cases.push_back({"every_type", std::move(all)});
}

TEST(GgufConformance, OddButValid_Accepted) {
  const TemporaryDirectory directory;
  std::vector<ValidCase> cases;
  add_valid_headers(cases);
  add_valid_layouts(cases);
  size_t false_rejects = 0;
  for (const ValidCase& test : cases) {
    SCOPED_TRACE(test.name);
    const std::string bytes = gguf(test.parts);
    const auto path = directory.write("case.gguf", bytes);
    for (const FileAccess access : {FileAccess::kMap, FileAccess::kRead}) {
      std::string what;
      const auto code = code_of(
          [&] {
            const io::GgufFile file = io::GgufFile::open(path, access);
            EXPECT_EQ(file.parts()[0].header.entries.size(), test.parts.entries.size());
            EXPECT_EQ(file.parts()[0].header.tensors.size(), test.parts.tensors.size());
          },
          &what);
      EXPECT_EQ(code, std::nullopt) << what;
      if (code) ++false_rejects;
    }
    EXPECT_EQ(code_of([&] { parse_gguf(bytes); }), std::nullopt);
  }
  EXPECT_GE(cases.size(), 15U);
  fmt::print("S2: {} odd but valid files, false rejects {}\n", cases.size(), false_rejects);
}

// A file whose header has no padding behind it, either because there is no tensor.
TEST(GgufConformance, HeaderAloneWithoutTensors_Accepted) {
  const std::string header = gguf_header({.entries = {gguf_entry("k", kGgufU8, "x")}});
  EXPECT_EQ(parse_gguf(header).entries.size(), 1U);
}

}  // namespace
}  // namespace conclave::testing
