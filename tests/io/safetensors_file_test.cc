#include "io/io_test_support.h"

#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

namespace conclave::testing {
namespace {

class SafetensorsFileTest : public ::testing::TestWithParam<FileAccess> {
 protected:
  SafetensorsFile open(std::string_view content) const {
    return SafetensorsFile::open(directory_.write("model.safetensors", content), GetParam());
  }
  TemporaryDirectory directory_;
};

std::string two_tensors() {
  return safetensors(R"({"__metadata__":{"format":"pt","x":"\u00e9"},)" +
                         entry("second", "U16", "[3]", "[8,14]") + "," +
                         entry("first", "F32", "[2,1]", "[0,8]") + "}",
                     14);
}

TEST_P(SafetensorsFileTest, Tensors_InFileOrderWithOffsets) {
  const std::string content = two_tensors();
  const SafetensorsFile file = open(content);
  ASSERT_EQ(file.tensors().size(), 2U);
  EXPECT_EQ(file.tensors()[0].name, "first");
  EXPECT_EQ(file.tensors()[0].dtype, DType::kF32);
  EXPECT_EQ(file.tensors()[0].shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(file.tensors()[0].file_offset, content.size() - 14);
  EXPECT_EQ(file.tensors()[1].name, "second");
  EXPECT_EQ(file.tensors()[1].file_offset, content.size() - 6);
  EXPECT_EQ(file.tensors()[1].bytes, 6U);
  EXPECT_EQ(file.find("second"), &file.tensors()[1]);
  EXPECT_EQ(file.find("third"), nullptr);
  EXPECT_EQ(file.metadata().at("x"), "\xC3\xA9");
  EXPECT_EQ(file.path(), directory_.path() / "model.safetensors");
}

TEST_P(SafetensorsFileTest, ReadAndLoad_GiveTheBytes) {
  const std::string content = two_tensors();
  const SafetensorsFile file = open(content);
  const TensorInfo& second = *file.find("second");
  std::string bytes(4, '\0');
  file.read(second, 1, std::as_writable_bytes(std::span(bytes)));
  EXPECT_EQ(bytes, content.substr(content.size() - 5, 4));
  const Tensor loaded = file.load("first");
  EXPECT_EQ(loaded.shape(), (Shape{2, 1}));
  EXPECT_EQ(std::string_view(loaded.as<char>(), 8), content.substr(content.size() - 14, 8));
  const std::span<const std::byte> mapped = file.mapped(second);
  EXPECT_EQ(mapped.size(), GetParam() == FileAccess::kMap ? 6U : 0U);
  if (!mapped.empty()) {
    EXPECT_EQ(std::memcmp(mapped.data(), content.data() + content.size() - 6, 6), 0);
  }
}

TEST_P(SafetensorsFileTest, ReadOutsideTheTensor_Refused) {
  const SafetensorsFile file = open(two_tensors());
  const TensorInfo& first = *file.find("first");
  std::array<std::byte, 4> bytes;
  for (const uint64_t offset : {uint64_t{5}, uint64_t{9}, ~uint64_t{0}, ~uint64_t{0} - 3}) {
    EXPECT_EQ(name_of(code_of([&] { file.read(first, offset, bytes); })), "kInvalidArgument");
  }
  TensorInfo forged = first;
  forged.file_offset = ~uint64_t{0} - 1;
  forged.bytes = ~uint64_t{0};
  EXPECT_EQ(name_of(code_of([&] { file.read(forged, 4, bytes); })), "kInvalidArgument");
  EXPECT_TRUE(file.mapped(forged).empty());
}

TEST_P(SafetensorsFileTest, LoadOfAbsentTensor_NamesIt) {
  const SafetensorsFile file = open(two_tensors());
  std::string what;
  EXPECT_EQ(name_of(code_of([&] { file.load("third"); }, &what)), "kTensorMissing");
  EXPECT_NE(what.find("third"), std::string::npos);
}

TEST_P(SafetensorsFileTest, RankAboveTheViewLimit_ListsButDoesNotLoad) {
  const SafetensorsFile file =
      open(safetensors("{" + entry("a", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") + "}", 1));
  EXPECT_EQ(file.tensors()[0].shape.size(), 9U);
  EXPECT_EQ(name_of(code_of([&] { file.load("a"); })), "kShape");
}

TEST_P(SafetensorsFileTest, NonFiniteData_IsData) {
  std::string content = safetensors("{" + entry("a", "F32", "[2]", "[0,8]") + "}");
  const float values[] = {std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::infinity()};
  content.append(reinterpret_cast<const char*>(values), sizeof(values));
  const Tensor loaded = open(content).load("a");
  EXPECT_TRUE(std::isnan(loaded.as<float>()[0]));
  EXPECT_EQ(loaded.as<float>()[1], values[1]);
}

TEST_P(SafetensorsFileTest, ScalarAndEmptyTensors_Load) {
  const SafetensorsFile file = open(safetensors("{" + entry("scalar", "U8", "[]", "[0,1]") + "," +
                                                    entry("empty", "F64", "[3,0]", "[1,1]") + "}",
                                                1));
  EXPECT_EQ(file.load("scalar").size_bytes(), 1U);
  EXPECT_EQ(file.load("empty").size_bytes(), 0U);
  EXPECT_EQ(file.load("empty").shape(), (Shape{3, 0}));
}

INSTANTIATE_TEST_SUITE_P(Access, SafetensorsFileTest, ::testing::ValuesIn(kAccessModes),
                         access_name);

TEST(SafetensorsFile, BytesShorterThanTheirHeader_Refused) {
  const std::string file = safetensors("{}      ");
  EXPECT_EQ(name_of(code_of([&] {
              SafetensorsFile::parse_header(bytes_of(file).first(10), file.size(), "a");
            })),
            "kSafetensorsHeaderTruncated");
  std::map<std::string, std::string> metadata;
  const std::string with_metadata = safetensors(R"({"__metadata__":{"k":"v"}})");
  SafetensorsFile::parse_header(bytes_of(with_metadata), with_metadata.size(), "a", &metadata);
  EXPECT_EQ(metadata.at("k"), "v");
}

}  // namespace
}  // namespace conclave::testing
