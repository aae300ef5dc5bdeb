#include "io/gguf/file.h"
#include "io/gguf_bytes.h"
#include "io/io_test_support.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <string>

namespace conclave::testing {
namespace {

using io::GgufFile;
using io::GgufHeader;

template <class T>
T value_of(const GgufHeader& header, std::string_view key) {
  const io::GgufValue* value = header.find_value(key);
  if (value == nullptr || !std::holds_alternative<T>(*value)) {
    ADD_FAILURE() << key << (value == nullptr ? " is absent" : " has another type");
    return T{};
  }
  return std::get<T>(*value);
}

TEST(GgufHeader, Scalars_WidenToTheirKind) {
  const GgufHeader header =
      parse_gguf(gguf({.entries = {
                           gguf_entry("u8", kGgufU8, uint8_t{200}),
                           gguf_entry("i8", kGgufI8, int8_t{-100}),
                           gguf_entry("u16", kGgufU16, uint16_t{60'000}),
                           gguf_entry("i16", kGgufI16, int16_t{-30'000}),
                           gguf_entry("u32", kGgufU32, ~0U),
                           gguf_entry("i32", kGgufI32, -1),
                           gguf_entry("f32", kGgufF32, 0.1F),
                           gguf_entry("no", kGgufBoolean, uint8_t{0}),
                           gguf_entry("yes", kGgufBoolean, uint8_t{1}),
                           gguf_entry("text", kGgufText, gguf_text("a\nb")),
                           gguf_entry("u64", kGgufU64, ~uint64_t{0}),
                           gguf_entry("i64", kGgufI64, std::numeric_limits<int64_t>::min()),
                           gguf_entry("f64", kGgufF64, 1e300),
                       }}));
  EXPECT_EQ(value_of<uint64_t>(header, "u8"), 200U);
  EXPECT_EQ(value_of<int64_t>(header, "i8"), -100);
  EXPECT_EQ(value_of<uint64_t>(header, "u16"), 60'000U);
  EXPECT_EQ(value_of<int64_t>(header, "i16"), -30'000);
  EXPECT_EQ(value_of<uint64_t>(header, "u32"), 4'294'967'295U);
  EXPECT_EQ(value_of<int64_t>(header, "i32"), -1);
  EXPECT_EQ(value_of<double>(header, "f32"), double{0.1F});
  EXPECT_FALSE(value_of<bool>(header, "no"));
  EXPECT_TRUE(value_of<bool>(header, "yes"));
  EXPECT_EQ(value_of<std::string>(header, "text"), "a\nb");
  EXPECT_EQ(value_of<uint64_t>(header, "u64"), ~uint64_t{0});
  EXPECT_EQ(value_of<int64_t>(header, "i64"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(value_of<double>(header, "f64"), 1e300);
  EXPECT_EQ(header.find_value("u7"), nullptr);
  EXPECT_EQ(header.entries.front().key, "u8");
  EXPECT_EQ(header.entries.back().key, "f64");
}

TEST(GgufHeader, Arrays_KeepNumbersUpTo65536) {
  const std::string numbers = little_endian(int16_t{-7}) + little_endian(int16_t{8});
  const std::string floats = little_endian(0.5F) + little_endian(-4.0F);
  const GgufHeader
      header =
          parse_gguf(
              gguf(
                  {
                      .entries =
                          {
                              gguf_entry("numbers", kGgufList, gguf_array(kGgufI16, 2, numbers)),
                              gguf_entry("floats", kGgufList, gguf_array(kGgufF32, 2, floats)),
                              gguf_entry("wide", kGgufList,
                                         gguf_array(kGgufU64, 1, little_endian(~uint64_t{0}))),
                              gguf_entry("bools", kGgufList,
                                         gguf_array(kGgufBoolean, 2, std::string("\1\0", 2))),
                              gguf_entry("words", kGgufList,
                                         gguf_array(kGgufText, 2,
                                                    gguf_text("") + gguf_text("word"))),
                              gguf_entry("none", kGgufList, gguf_array(kGgufF32, 0)),
                              gguf_entry(
                                  "most", kGgufList,
                                  gguf_array(kGgufU8, 65'536, std::string(65'536, '\5'))),
                              gguf_entry(
                                  "more", kGgufList,
                                  gguf_array(kGgufU32, 65'537, std::string(4 * 65'537, '\5'))),
                              gguf_entry(
                                  "flags",
                                  kGgufList, gguf_array(kGgufBoolean, 65'537, std::string(65'537, '\1'))),
                              gguf_entry("behind", kGgufU8, uint8_t{9}),
                          },
                  }));
  const auto array = [&](std::string_view key) { return value_of<io::GgufArray>(header, key); };
  EXPECT_EQ(array("numbers").numbers, (std::vector<double>{-7, 8}));
  EXPECT_EQ(array("floats").numbers, (std::vector<double>{0.5, -4}));
  EXPECT_EQ(array("wide").numbers, (std::vector<double>{0x1p64}));
  EXPECT_EQ(array("bools").numbers, (std::vector<double>{1, 0}));
  EXPECT_FALSE(array("words").of_numbers);
  EXPECT_EQ(array("words").count, 2U);
  EXPECT_TRUE(array("none").of_numbers);
  EXPECT_EQ(array("none").count, 0U);
  EXPECT_EQ(array("most").numbers, std::vector<double>(65'536, 5));
  EXPECT_EQ(array("more").count, 65'537U);
  EXPECT_TRUE(array("more").numbers.empty());
  EXPECT_EQ(array("flags").count, 65'537U);
  EXPECT_EQ(value_of<uint64_t>(header, "behind"), 9U);
}

// Keys and values that lie across the reader's pieces of 256 KiB.
TEST(GgufHeader, ValuesAcrossPieces_Read) {
  constexpr size_t kPiece = size_t{1} << 18;
  for (const size_t bytes : {kPiece - 60, kPiece - 50, kPiece - 40, kPiece, 3 * kPiece}) {
    std::string text(bytes, 'x');
    for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>('a' + i % 23);
    const std::string words = gguf_text(text) + gguf_text("behind");
    const GgufHeader header = parse_gguf(
        gguf({.entries = {gguf_entry("text", kGgufText, gguf_text(text)),
                          gguf_entry("words", kGgufList, gguf_array(kGgufText, 2, words)),
                          gguf_entry("last", kGgufU64, uint64_t{77})},
              .tensors = {gguf_tensor("a", {2}, kTypeF32, 0)},
              .data_bytes = 8}));
    EXPECT_EQ(value_of<std::string>(header, "text"), text);
    EXPECT_EQ(value_of<uint64_t>(header, "last"), 77U);
    EXPECT_NE(header.find_tensor("a"), nullptr);
  }
}

std::string two_tensors() {
  return gguf({.entries = {gguf_entry("general.alignment", kGgufU32, 64U)},
               .tensors = {gguf_tensor("second", {256, 3, 2}, kTypeQ4K, 0),
                           gguf_tensor("first", {5, 1}, kTypeF32, 896)},
               .data_bytes = 896 + 20,
               .alignment = 64});
}

class GgufFileTest : public ::testing::TestWithParam<FileAccess> {
 protected:
  GgufFile open(std::string_view content) const {
    return GgufFile::open(directory_.write("model.gguf", content), GetParam());
  }
  TemporaryDirectory directory_;
};

TEST_P(GgufFileTest, Tensors_InFileOrderWithRowsLast) {
  const std::string content = two_tensors();
  const GgufFile file = open(content);
  const GgufHeader& header = file.parts()[0].header;
  EXPECT_EQ(header.version, 3U);
  EXPECT_EQ(header.alignment, 64U);
  ASSERT_EQ(header.tensors.size(), 2U);
  const io::GgufTensor& blocks = header.tensors[0];
  EXPECT_EQ(blocks.name, "second");
  EXPECT_EQ(blocks.type->name, "Q4_K");
  EXPECT_EQ(std::vector<int64_t>(blocks.shape().begin(), blocks.shape().end()),
            (std::vector<int64_t>{2, 3, 256}));
  EXPECT_EQ(blocks.bytes, 6 * 144U);
  EXPECT_EQ(blocks.file_offset, content.size() - 916);
  EXPECT_EQ(io::describe_tensor(blocks), "Q4_K [2, 3, 256]");
  EXPECT_EQ(header.tensors[1].file_offset, content.size() - 20);
  EXPECT_EQ(file.find_tensor("first").tensor, &header.tensors[1]);
  EXPECT_EQ(file.find_tensor("first").part, &file.parts()[0]);
  EXPECT_FALSE(file.find_tensor("third"));
  EXPECT_NE(file.find_value("general.alignment"), nullptr);
}

TEST_P(GgufFileTest, ReadAndMapped_GiveTheBytes) {
  const std::string content = two_tensors();
  const GgufFile file = open(content);
  const GgufFile::Place first = file.find_tensor("first");
  std::string bytes(7, '\0');
  GgufFile::read(first, 13, std::as_writable_bytes(std::span(bytes)));
  EXPECT_EQ(bytes, content.substr(content.size() - 7));
  const std::span<const std::byte> mapped = GgufFile::mapped(first);
  ASSERT_EQ(mapped.size(), GetParam() == FileAccess::kMap ? 20U : 0U);
  if (!mapped.empty()) {
    EXPECT_EQ(std::memcmp(mapped.data(), content.data() + content.size() - 20, 20), 0);
  }
}

TEST_P(GgufFileTest, ReadOutsideTheTensor_Refused) {
  const GgufFile file = open(two_tensors());
  const GgufFile::Place first = file.find_tensor("first");
  std::array<std::byte, 4> bytes;
  for (const uint64_t offset : {uint64_t{17}, uint64_t{21}, ~uint64_t{0}, ~uint64_t{0} - 3}) {
    EXPECT_EQ(name_of(code_of([&] { GgufFile::read(first, offset, bytes); })), "kInvalidArgument");
  }
  io::GgufTensor forged = *first.tensor;
  forged.file_offset = ~uint64_t{0} - 1;
  forged.bytes = ~uint64_t{0};
  const GgufFile::Place outside = {first.part, &forged};
  EXPECT_EQ(name_of(code_of([&] { GgufFile::read(outside, 4, bytes); })), "kInvalidArgument");
  EXPECT_TRUE(GgufFile::mapped(outside).empty());
}

INSTANTIATE_TEST_SUITE_P(Access, GgufFileTest, ::testing::ValuesIn(kAccessModes), access_name);

TEST(GgufFile, NoFile_RefusedAsSuch) {
  const TemporaryDirectory directory;
  EXPECT_EQ(name_of(code_of([&] { GgufFile::open(directory.path() / "absent.gguf"); })),
            "kFileNotFound");
  EXPECT_EQ(name_of(code_of([&] { GgufFile::open(directory.path()); })), "kFileNotRegular");
}

}  // namespace
}  // namespace conclave::testing
