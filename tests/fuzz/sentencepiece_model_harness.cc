#include "convert/tokenizer/sentencepiece_model.h"
#include "fuzz/harness.h"
#include "fuzz/promises.h"

#include <cmath>
#include <set>
#include <string_view>

namespace conclave::testing {

void fuzz_sentencepiece_model(std::span<const std::byte> input) {
  const std::string_view bytes(reinterpret_cast<const char*>(input.data()), input.size());
  expect_value_or_error([&] {
    const conversion::SentencePieceModel model =
        conversion::parse_sentencepiece_model(bytes, "fuzz.model");
    promise(!model.pieces.empty());
    std::set<std::string_view> texts;
    size_t size = 0;
    int unknown = 0;
    for (const conversion::SentencePiece& piece : model.pieces) {
      promise(!piece.text.empty() && texts.insert(piece.text).second);
      promise(std::isfinite(piece.score));
      promise(piece.kind >= conversion::kNormal && piece.kind <= conversion::kByte);
      if (piece.kind == conversion::kUnknown) ++unknown;
      size += piece.text.size();
    }
    promise(unknown == 1);
    promise(size < bytes.size());
  });
}

}  // namespace conclave::testing
