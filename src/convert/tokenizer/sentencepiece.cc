// tokenizer.model of SentencePiece, whose pieces are merged by their scores.
#include "convert/source_model.h"
#include "convert/tokenizer/piece_tokens.h"
#include "convert/tokenizer/sentencepiece_model.h"
#include "convert/tokenizer/vocabulary.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>

namespace conclave::inline v0::conversion {
namespace {

// The largest published model has 5 MB.
constexpr uintmax_t kMostBytes = uintmax_t{64} << 20;

SentencePieceModel read_model(const std::filesystem::path& path) {
  std::error_code problem;
  const uintmax_t bytes = std::filesystem::file_size(path, problem);
  if (!problem && bytes > kMostBytes) {
    throw Error(ErrorCode::kTokenizerModel, {.what = "the file is too large for a tokenizer",
                                             .file = path.string(),
                                             .found = fmt::format("{} bytes", bytes),
                                             .limit = fmt::format("{} bytes", kMostBytes)});
  }
  return parse_sentencepiece_model(read_whole_file(path), path.string());
}

// llama.cpp merges neighbours by score, and changes nothing of a text but its spaces.
void check_algorithm(const SentencePieceModel& model) {
  if (!model.merges_by_score) {
    throw UnwrittenVocabulary("tokenizer.model is none of byte-pair encoding");
  }
  if (!model.falls_back_to_bytes) {
    throw UnwrittenVocabulary("tokenizer.model has no tokens for bytes");
  }
  if (model.maps_characters || model.removes_extra_spaces || !model.escapes_spaces) {
    throw UnwrittenVocabulary("tokenizer.model normalises text");
  }
  if (model.spaces_are_suffixes) {
    throw UnwrittenVocabulary("tokenizer.model has spaces at the ends of words");
  }
}

bool has_sentencepiece(const TokenizerFiles& files) {
  return sentencepiece_path(files).has_value();
}

Vocabulary read_sentencepiece(const TokenizerFiles& files, int64_t rows) {
  const SentencePieceModel model = read_model(*sentencepiece_path(files));
  check_algorithm(model);
  TokenTable table(rows);
  int64_t id = 0;
  for (const SentencePiece& piece : model.pieces) {
    const bool is_whole = piece.kind == kUserDefined;
    table.put(id++, is_whole ? with_spaces(piece.text) : piece.text, piece.kind, piece.score);
  }
  Vocabulary vocabulary = vocabulary_of_pieces(
      files, std::move(table), model.adds_prefix ? TextPrefix::kSpace : TextPrefix::kNone);
  vocabulary.roles = {
      {"bos", model.begin}, {"eos", model.end}, {"unk", model.unknown}, {"pad", model.padding}};
  return vocabulary;
}

}  // namespace

constexpr VocabularyKind kSentencePieceVocabulary = {.is_kind_of = has_sentencepiece,
                                                     .read = read_sentencepiece};

}  // namespace conclave::inline v0::conversion
