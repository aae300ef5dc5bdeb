#include "convert/tokenizer/sentencepiece_model.h"

#include "convert/tokenizer/protobuf_reader.h"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <unordered_map>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

// The largest published vocabularies have a quarter of them.
constexpr size_t kMostPieces = size_t{1} << 20;
constexpr size_t kMostPieceBytes = 4096;

// Numbers of fields and values in sentencepiece_model.proto.
namespace model_field {
enum : uint32_t { kPiece = 1, kTrainer = 2, kNormalizer = 3 };
}
namespace piece_field {
enum : uint32_t { kText = 1, kScore = 2, kKind = 3 };
}
namespace trainer_field {
enum : uint32_t {
  kAlgorithm = 3,
  kSpacesAreSuffixes = 24,
  kByteFallback = 35,
  kUnknown = 45,
  kBegin = 46,
  kEnd = 47,
  kPadding = 48
};
}
namespace normalizer_field {
enum : uint32_t { kCharacters = 2, kPrefix = 3, kExtraSpaces = 4, kEscapes = 5 };
}
constexpr int32_t kBytePairs = 2;

TokenKind kind_of(const ProtobufReader& reader, const ProtobufField& field) {
  const int32_t kind = reader.int_of(field);
  if (kind < kNormal || kind > kByte) reader.fail("a piece is of no known kind", field.offset);
  return static_cast<TokenKind>(kind);
}

SentencePiece read_piece(ProtobufReader reader, size_t offset) {
  SentencePiece piece;
  while (!reader.at_end()) {
    const ProtobufField field = reader.next();
    if (field.number == piece_field::kText) piece.text = reader.bytes_of(field);
    if (field.number == piece_field::kScore) piece.score = reader.float_of(field);
    if (field.number == piece_field::kKind) piece.kind = kind_of(reader, field);
  }
  if (piece.text.empty()) reader.fail("a piece is empty", offset);
  if (piece.text.size() > kMostPieceBytes) reader.fail("a piece is too long", offset);
  if (!std::isfinite(piece.score)) reader.fail("a score is no finite number", offset);
  return piece;
}

void read_trainer(ProtobufReader reader, SentencePieceModel& model) {
  while (!reader.at_end()) {
    const ProtobufField field = reader.next();
    switch (field.number) {
      case trainer_field::kAlgorithm:
        model.merges_by_score = reader.int_of(field) == kBytePairs;
        break;
      case trainer_field::kSpacesAreSuffixes:
        model.spaces_are_suffixes = reader.bool_of(field);
        break;
      case trainer_field::kByteFallback:
        model.falls_back_to_bytes = reader.bool_of(field);
        break;
      case trainer_field::kUnknown:
        model.unknown = reader.bytes_of(field);
        break;
      case trainer_field::kBegin:
        model.begin = reader.bytes_of(field);
        break;
      case trainer_field::kEnd:
        model.end = reader.bytes_of(field);
        break;
      case trainer_field::kPadding:
        model.padding = reader.bytes_of(field);
        break;
      default:
        break;
    }
  }
}

void read_normalizer(ProtobufReader reader, SentencePieceModel& model) {
  while (!reader.at_end()) {
    const ProtobufField field = reader.next();
    switch (field.number) {
      case normalizer_field::kCharacters:
        model.maps_characters = !reader.bytes_of(field).empty();
        break;
      case normalizer_field::kPrefix:
        model.adds_prefix = reader.bool_of(field);
        break;
      case normalizer_field::kExtraSpaces:
        model.removes_extra_spaces = reader.bool_of(field);
        break;
      case normalizer_field::kEscapes:
        model.escapes_spaces = reader.bool_of(field);
        break;
      default:
        break;
    }
  }
}

void check_pieces(const ProtobufReader& reader, const SentencePieceModel& model, size_t bytes) {
  if (model.pieces.empty()) reader.fail("there are no pieces", bytes);
  std::unordered_map<std::string_view, size_t> ids;
  int64_t unknown = 0;
  for (size_t id = 0; id < model.pieces.size(); ++id) {
    const SentencePiece& piece = model.pieces[id];
    if (piece.kind == kUnknown) ++unknown;
    const auto [same, is_first] = ids.emplace(piece.text, id);
    if (is_first) continue;
    reader.fail(fmt::format("pieces {} and {} have the same text", same->second, id), bytes);
  }
  if (unknown != 1) reader.fail(fmt::format("{} pieces are the unknown one", unknown), bytes);
}

}  // namespace

SentencePieceModel parse_sentencepiece_model(std::string_view bytes, std::string_view file) {
  ProtobufReader reader(bytes, file);
  SentencePieceModel model;
  while (!reader.at_end()) {
    const ProtobufField field = reader.next();
    if (field.number == model_field::kPiece) {
      if (model.pieces.size() == kMostPieces)
        reader.fail("there are too many pieces", field.offset);
      model.pieces.push_back(read_piece(reader.message_of(field), field.offset));
    }
    if (field.number == model_field::kTrainer) read_trainer(reader.message_of(field), model);
    if (field.number == model_field::kNormalizer) read_normalizer(reader.message_of(field), model);
  }
  check_pieces(reader, model, bytes.size());
  return model;
}

}  // namespace conclave::inline v0::conversion
