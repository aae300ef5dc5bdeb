#include "convert/tokenizer/split_rules.h"

#include "convert/tokenizer/token_table.h"
#include "convert/tokenizer/tokenizer_files.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <iterator>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::conversion {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kWords =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kDigitsAlone =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kByCase =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// DeepSeek's have control characters as such.
constexpr std::string_view kLineEnds = "[\r\n]";
constexpr std::string_view kCasedLetters =
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0"
    "-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-"
    "\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00"
    "-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"
    "\U000118df\U0001e900-\U0001e943]+";
constexpr std::string_view kPunctuation =
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+";
constexpr std::string_view kSpacesAtEnd = "\\s+$";
constexpr std::string_view kIdeographs = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+";
constexpr std::string_view kThreeDigits = "\\p{N}{1,3}";
constexpr std::string_view kIdeographsAndKana = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+";
constexpr std::string_view kWordsAndMarks =
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|"
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
    "\\s*[\r\n]+|\\s+(?!\\S)|\\s+";
// A step of its own, whose name here is no pattern.
constexpr std::string_view kEachDigit = "Digits(";

struct SplitRule {
  std::array<std::string_view, 6> steps;
  bool ignores_merges = false;  // a word of the vocabulary is not split
  std::string_view name;
};
constexpr std::array kRules = {
    SplitRule{{kDigitsAlone}, false, "qwen2"},
    SplitRule{{kByCase}, false, "gpt-4o"},
    SplitRule{{kByCase}, true, "gpt-4o"},
    SplitRule{{kWords}, false, "dbrx"},
    SplitRule{{kWords}, true, "llama-bpe"},
    SplitRule{{kThreeDigits, kIdeographsAndKana, kWordsAndMarks}, false, "deepseek-v3"},
    SplitRule{{kLineEnds, kCasedLetters, kPunctuation, kSpacesAtEnd, kIdeographs, kEachDigit},
              false,
              "deepseek-llm"},
};
// The byte-level step splits by its own rule where no other does.
constexpr std::string_view kOwnRule = "gpt-2";

[[noreturn]] void refuse_steps() {
  throw UnwrittenVocabulary("text is split in a way without a name in llama.cpp");
}

std::string text_of_step(const Json& step) {
  if (is_type(step, "Digits") && step.value("individual_digits", false)) {
    return std::string(kEachDigit);
  }
  const bool isolates = is_type(step, "Split") && step.value("behavior", "") == "Isolated" &&
                        !step.value("invert", false);
  const std::string pattern = isolates ? step.at("pattern").value("Regex", "") : "";
  if (pattern.empty()) refuse_steps();
  return pattern;
}

// The steps that split, in front of the byte-level one.
std::vector<std::string> split_steps(const Json& before) {
  if (!is_type(before, "Sequence") || before.at("pretokenizers").size() < 2) refuse_steps();
  auto steps = before.at("pretokenizers").get<std::vector<Json>>();
  const Json bytes = steps.back();
  steps.pop_back();
  const bool is_plain = is_type(bytes, "ByteLevel") && !bytes.value("use_regex", true) &&
                        !bytes.value("add_prefix_space", true);
  if (!is_plain) refuse_steps();
  std::vector<std::string> texts;
  std::ranges::transform(steps, std::back_inserter(texts), text_of_step);
  return texts;
}

bool has_steps(const SplitRule& rule, std::span<const std::string> texts) {
  if (texts.size() > rule.steps.size()) return false;
  for (size_t i = 0; i < rule.steps.size(); ++i) {
    if (rule.steps[i] != (i < texts.size() ? std::string_view(texts[i]) : "")) return false;
  }
  return true;
}

// llama.cpp leaves digits together where the step parts them: merges must do so too.
void check_lone_digits(const Json& tokenizer) {
  for (const Json& merge : tokenizer.at("model").at("merges")) {
    const std::string text = merge.is_string()
                                 ? merge.get<std::string>()
                                 : merge.at(0).get<std::string>() + merge.at(1).get<std::string>();
    const bool has_digit =
        std::ranges::any_of(text, [](unsigned char c) { return std::isdigit(c); });
    if (has_digit) throw UnwrittenVocabulary("merges have digits, which the rule sets apart");
  }
}

}  // namespace

std::string_view split_name(const Json& tokenizer) {
  const Json before = tokenizer.value("pre_tokenizer", Json());
  if (is_type(before, "ByteLevel")) {
    if (before.value("use_regex", true) && !before.value("add_prefix_space", true)) return kOwnRule;
    throw UnwrittenVocabulary("the byte-level step has another rule");
  }
  const std::vector<std::string> steps = split_steps(before);
  const bool ignores = tokenizer.at("model").value("ignore_merges", false);
  for (const SplitRule& rule : kRules) {
    if (!has_steps(rule, steps) || rule.ignores_merges != ignores) continue;
    if (steps.back() == kEachDigit) check_lone_digits(tokenizer);
    return rule.name;
  }
  throw UnwrittenVocabulary("text is split by a pattern without a name in llama.cpp");
}

}  // namespace conclave::inline v0::conversion
