// tokenizer.json that was made from a model of SentencePiece: its merges come in the order of the
// pieces' scores, so that scores by that order choose the same merges.
#include "convert/tokenizer/piece_tokens.h"
#include "convert/tokenizer/vocabulary.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace conclave::inline v0::conversion {
namespace {

using Json = nlohmann::json;

// All splits of a piece are looked at, which takes the square of its length.
constexpr size_t kLongestPieceBytes = 512;
// To merge a piece takes the square of these; published ones have half as many.
constexpr size_t kMostCharacters = 64;

// The steps before the model: none, one, or those of a sequence.
std::vector<Json> steps_of(const Json& tokenizer, const char* name, const char* list) {
  const Json step = tokenizer.value(name, Json());
  if (step.is_null()) return {};
  if (is_type(step, "Sequence")) return step.at(list).get<std::vector<Json>>();
  return {step};
}

bool replaces(const Json& step, const char* kind, std::string_view from, std::string_view to) {
  return is_type(step, "Replace") && step.at("pattern").value(kind, "") == from &&
         step.value("content", "") == to;
}

TextPrefix prefix_of(const Json& tokenizer) {
  std::vector<Json> before = steps_of(tokenizer, "normalizer", "normalizers");
  const std::vector<Json> splits = steps_of(tokenizer, "pre_tokenizer", "pretokenizers");
  const bool prepends = !before.empty() && is_type(before.front(), "Prepend") &&
                        before.front().value("prepend", "") == kPieceSpace;
  if (prepends) before.erase(before.begin());
  const bool makes_spaces = !before.empty() && replaces(before.front(), "String", " ", kPieceSpace);
  if (makes_spaces) before.erase(before.begin());
  if (splits.empty() && before.empty() && makes_spaces)
    return prepends ? TextPrefix::kSpace : TextPrefix::kNone;
  // The step behind it sets no space before a text that has one, unless that is doubled.
  const bool doubles =
      makes_spaces && before.size() == 1 && replaces(before.front(), "Regex", "\\A▁", "▁▁");
  if (doubles) before.clear();
  const bool is_one_split = !prepends && before.empty() && splits.size() == 1 &&
                            is_type(splits.front(), "Metaspace") &&
                            splits.front().value("replacement", "") == kPieceSpace &&
                            !splits.front().value("split", true);
  if (!is_one_split) throw UnwrittenVocabulary("text is split or normalised before the merges");
  const std::string scheme = splits.front().value("prepend_scheme", "always");
  if (scheme == "never" && doubles) throw UnwrittenVocabulary("spaces before a text are doubled");
  return scheme == "never" ? TextPrefix::kNone : TextPrefix::kSpace;
}

class PieceScores {
 public:
  explicit PieceScores(const Json& model) {
    for (const auto& [text, id] : model.at("vocab").items()) ids_.emplace(text, id.get<int64_t>());
    for (const Json& merge : model.at("merges")) take(merge);
  }

  // Throws UnwrittenVocabulary unless every piece that two others make has a merge of them: then
  // llama.cpp, which knows no merges, makes it of the same ones.
  void check(const std::unordered_set<std::string>& never_made) const {
    for (const auto& [text, id] : ids_) {
      if (!is_byte_token(text) && !never_made.contains(text)) check_piece(text);
    }
  }
  // The same unless merges make every piece, for texts that are pieces as a whole.
  void check_whole(const std::unordered_set<std::string>& never_made) const {
    for (const auto& [text, id] : ids_) {
      if (is_byte_token(text) || never_made.contains(text) || makes(text)) continue;
      throw UnwrittenVocabulary(fmt::format("\"{}\" is taken whole, but not merged", text));
    }
  }

  const std::unordered_map<std::string, int64_t>& ids() const { return ids_; }
  float score_of(const std::string& text) const {
    const auto found = scores_.find(text);
    return found == scores_.end() ? -static_cast<float>(scores_.size()) : found->second;
  }

 private:
  void take(const Json& merge) {
    std::string left;
    std::string right;
    if (merge.is_string()) {
      const auto both = merge.get<std::string>();
      const size_t space = both.find(' ');
      if (space == std::string::npos) throw UnwrittenVocabulary("a merge has no second part");
      left = both.substr(0, space);
      right = both.substr(space + 1);
    } else {
      left = merge.at(0).get<std::string>();
      right = merge.at(1).get<std::string>();
    }
    const std::string made = left + right;
    if (made != last_ && !scores_.emplace(made, -static_cast<float>(scores_.size())).second) {
      throw UnwrittenVocabulary("the merges are not in the order of pieces");
    }
    last_ = made;
    splits_.emplace(made, left.size());
  }

  void check_piece(const std::string& text) const {
    if (text.size() > kLongestPieceBytes) throw UnwrittenVocabulary("a piece is too long");
    size_t begin = 0;
    for (size_t at = 1; at <= text.size(); ++at) {
      const bool is_within = at < text.size() && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80;
      if (is_within) continue;
      const std::string character = text.substr(begin, at - begin);
      const bool has_both = ids_.contains(text.substr(0, at)) && ids_.contains(text.substr(at));
      if (!ids_.contains(character) || has_both != splits_.contains({text, at})) {
        throw UnwrittenVocabulary(fmt::format("\"{}\" is made by some merges only", text));
      }
      begin = at;
    }
  }

  // Whether merges, the best one first, make the text of its characters.
  bool makes(const std::string& text) const {
    std::vector<std::string> parts;
    for (const char byte : text) {
      const bool is_within = (static_cast<uint8_t>(byte) & 0xC0) == 0x80;
      if (!is_within || parts.empty()) parts.emplace_back();
      parts.back() += byte;
    }
    if (parts.size() > kMostCharacters) return false;
    while (parts.size() > 1) {
      size_t best = 0;
      float best_score = -std::numeric_limits<float>::infinity();
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto merge = scores_.find(parts[i] + parts[i + 1]);
        if (merge == scores_.end() || merge->second <= best_score) continue;
        best = i;
        best_score = merge->second;
      }
      if (best_score == -std::numeric_limits<float>::infinity()) return false;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    return true;
  }

  std::unordered_map<std::string, int64_t> ids_;
  std::unordered_map<std::string, float> scores_;
  std::set<std::pair<std::string, size_t>> splits_;  // a piece and where a merge joins it
  std::string last_;
};

void check_model(const Json& model) {
  const bool is_plain = model.value("dropout", Json()).is_null() &&
                        model.value("continuing_subword_prefix", Json()).is_null() &&
                        model.value("end_of_word_suffix", Json()).is_null();
  if (!is_plain) throw UnwrittenVocabulary("the merges of tokenizer.json are no plain ones");
}

bool has_merged_pieces(const TokenizerFiles& files) {
  return tokenizer_type(files) == "BPE" &&
         files.tokenizer->at("model").value("byte_fallback", false);
}

Vocabulary read_merged_pieces(const TokenizerFiles& files, int64_t rows) {
  const Json& tokenizer = *files.tokenizer;
  const Json& model = tokenizer.at("model");
  check_model(model);
  const TextPrefix prefix = prefix_of(tokenizer);
  const PieceScores scores(model);
  std::unordered_set<std::string> added;
  for (const Json& token : tokenizer.value("added_tokens", Json::array())) {
    added.insert(token.at("content").get<std::string>());
  }
  scores.check(added);
  if (model.value("ignore_merges", false)) scores.check_whole(added);
  TokenTable table(rows);
  for (const auto& [text, id] : scores.ids()) {
    const TokenKind kind = is_byte_token(text) ? kByte : kNormal;
    table.put(id, text, kind, kind == kByte ? 0 : scores.score_of(text));
  }
  Vocabulary vocabulary = vocabulary_of_pieces(files, std::move(table), prefix);
  const Json unknown = model.value("unk_token", Json());
  if (unknown.is_string()) vocabulary.roles = {{"unk", unknown.get<std::string>()}};
  return vocabulary;
}

}  // namespace

constexpr VocabularyKind kMergedPiecesVocabulary = {.is_kind_of = has_merged_pieces,
                                                    .read = read_merged_pieces};

}  // namespace conclave::inline v0::conversion
