// A tokenizer.model is read within its bytes, whatever it claims about itself.
#include "convert/tokenizer/sentencepiece_model.h"

#include "sentencepiece_bytes.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

namespace conclave::inline v0::conversion {
namespace {

using namespace conclave::testing;

std::string trained_model() {
  std::ifstream file("testdata/tokenizers/sentencepiece/tokenizer.model", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string error_of(const std::string& bytes) {
  try {
    parse_sentencepiece_model(bytes, "model/tokenizer.model");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTokenizerModel);
    EXPECT_EQ(error.detail().file, "model/tokenizer.model");
    return error.what();
  }
  return "";
}

TEST(SentencePieceModel, Trained_HasItsPiecesAndRules) {
  const SentencePieceModel model = parse_sentencepiece_model(trained_model(), "tokenizer.model");
  ASSERT_EQ(model.pieces.size(), 384U);
  EXPECT_EQ(model.pieces[0].text, "<unk>");
  EXPECT_EQ(model.pieces[0].kind, kUnknown);
  EXPECT_EQ(model.pieces[2].kind, kControl);
  EXPECT_EQ(model.pieces[13].text, "<0x0A>");
  EXPECT_EQ(model.pieces[13].kind, kByte);
  EXPECT_EQ(model.pieces[300].kind, kNormal);
  EXPECT_EQ(model.pieces[300].score, -41.0F);
  EXPECT_TRUE(model.merges_by_score);
  EXPECT_TRUE(model.falls_back_to_bytes);
  EXPECT_TRUE(model.adds_prefix);
  EXPECT_FALSE(model.maps_characters);
  EXPECT_FALSE(model.removes_extra_spaces);
  EXPECT_TRUE(model.escapes_spaces);
}

// Most cuts lie within a piece; one between two pieces is a model with fewer of them.
TEST(SentencePieceModel, CutAnywhere_IsAnErrorOrASmallerModel) {
  const std::string bytes = trained_model();
  const size_t pieces = parse_sentencepiece_model(bytes, "tokenizer.model").pieces.size();
  size_t errors = 0;
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::string cut = bytes.substr(0, size);
    if (!error_of(cut).empty()) {
      ++errors;
    } else {
      EXPECT_LE(parse_sentencepiece_model(cut, "tokenizer.model").pieces.size(), pieces);
    }
  }
  EXPECT_GT(errors, bytes.size() * 9 / 10);
}

TEST(SentencePieceModel, FieldsWithoutAMeaningHere_ArePassedOver) {
  const std::string more = number_field(77, uint64_t{1} << 63) + bytes_field(4, "any") +
                           float_field(90, 1.0F) + varint(uint64_t{91} << 3 | 1) + "12345678";
  const SentencePieceModel model = parse_sentencepiece_model(
      more + piece_field("<unk>", 0, 2) + more + piece_field("a", -1, 1) + trainer_field({}) + more,
      "tokenizer.model");
  EXPECT_EQ(model.pieces.size(), 2U);
  EXPECT_TRUE(model.merges_by_score);
}

TEST(SentencePieceModel, Damaged_IsAnErrorThatNamesTheFile) {
  const std::string unknown = piece_field("<unk>", 0, 2);
  struct Case {
    std::string bytes;
    const char* what;
  };
  const std::string eleven(11, '\xFF');
  for (const auto& [bytes, what] :
       {Case{"", "there are no pieces"},
        Case{trainer_field({}), "there are no pieces"},
        Case{"{\"model\": 1}", "a field"},
        Case{varint(1U << 3 | 2) + varint(uint64_t{1} << 62) + "abc", "ends behind its message"},
        Case{unknown + varint(1U << 3 | 2) + varint(4) + bytes_field(1, "toolong"),
             "ends behind its message"},
        Case{eleven, "more than 64 bits"},
        Case{varint(3U << 3 | 3), "no known type"},
        Case{std::string("\x02\x00", 2), "has no number"},
        Case{varint(uint64_t{1} << 32 << 3), "has no number"},
        Case{number_field(1, 7), "of another type"},
        Case{bytes_field(1, number_field(1, 7)), "of another type"},
        Case{bytes_field(1, bytes_field(1, "a") + number_field(2, 7)), "of another type"},
        Case{unknown + bytes_field(2, bytes_field(3, "bpe")), "of another type"},
        Case{unknown + bytes_field(3, number_field(2, 1)), "of another type"},
        Case{piece_field("", 0, 1), "a piece is empty"},
        Case{piece_field(std::string(5000, 'a'), 0, 1), "a piece is too long"},
        Case{piece_field("a", 0, 7), "no known kind"},
        Case{piece_field("a", 0, 0), "no known kind"},
        Case{piece_field("a", std::numeric_limits<float>::quiet_NaN(), 1), "no finite number"},
        Case{piece_field("a", 0, 1), "0 pieces are the unknown one"},
        Case{unknown + piece_field("a", 0, 2), "2 pieces are the unknown one"},
        Case{unknown + piece_field("a", 0, 1) + piece_field("a", 1, 1),
             "pieces 1 and 2 have the same text"}}) {
    EXPECT_NE(error_of(bytes).find(what), std::string::npos) << what << ": " << error_of(bytes);
  }
}

}  // namespace
}  // namespace conclave::inline v0::conversion
