#include "checkpoint/methods/module_rules.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cctype>
#include <cstdint>
#include <optional>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr size_t kMaxText = 255;
constexpr size_t kMaxExpression = 1000;
constexpr int kMaxDepth = 32;
constexpr int kMaxSteps = 20'000;
// Positions in the text, one beyond its last character included.
using Positions = std::bitset<kMaxText + 1>;

// The expression holds what is not known here.
struct Unknown {};

// Follows an expression over all positions that it can reach at once, so that repeats need no
// second try.
class Matcher {
 public:
  Matcher(std::string_view expression, std::string_view text)
      : expression_(expression), text_(text) {}

  Positions run() {
    Positions begin;
    begin.set(0);
    const Positions end = alternatives(begin);
    if (at_ != expression_.size()) throw Unknown{};
    return end;
  }

 private:
  bool is_at(char letter) const { return at_ < expression_.size() && expression_[at_] == letter; }
  bool skip(char letter) {
    if (!is_at(letter)) return false;
    ++at_;
    return true;
  }
  char next() {
    if (at_ == expression_.size()) throw Unknown{};
    return expression_[at_++];
  }

  Positions alternatives(const Positions& from) {
    if (++depth_ > kMaxDepth) throw Unknown{};
    Positions reached = sequence(from);
    while (skip('|')) reached |= sequence(from);
    --depth_;
    return reached;
  }

  Positions sequence(Positions from) {
    while (at_ < expression_.size() && !is_at('|') && !is_at(')')) from = repeated(from);
    return from;
  }

  Positions repeated(const Positions& from) {
    const size_t begin = at_;
    const Positions once = atom(from);
    const bool any = skip('*');
    const bool more = !any && skip('+');
    const bool maybe = !any && !more && skip('?');
    if (is_at('{')) throw Unknown{};
    if (any || more || maybe) skip('?');  // lazy repeats reach the same positions
    if (maybe) return from | once;
    if (!any && !more) return once;
    const size_t end = at_;
    Positions all = once;
    for (Positions last = once; last.any();) {
      at_ = begin;
      last = atom(last) & ~all;
      all |= last;
    }
    at_ = end;
    return any ? all | from : all;
  }

  Positions atom(const Positions& from) {
    if (--steps_left_ < 0) throw Unknown{};
    const char letter = next();
    switch (letter) {
      case '(':
        return group(from);
      case '[':
        return step(from, character_class());
      case '^':
        return from & Positions(1);
      case '$':
        return from & (Positions(1) << text_.size());
      case '.':
        return step(from, [](char) { return true; });
      case '\\':
        return escaped(from, next());
      case '*':
      case '+':
      case '?':
      case '{':
        throw Unknown{};
      default:
        return step(from, [letter](char found) { return found == letter; });
    }
  }

  Positions group(const Positions& from) {
    if (skip('?') && !skip(':')) throw Unknown{};
    const Positions reached = alternatives(from);
    if (!skip(')')) throw Unknown{};
    return reached;
  }

  Positions escaped(const Positions& from, char letter) {
    if (letter == 'd') return step(from, is_digit);
    if (letter == 'w') return step(from, is_word);
    if (std::isalnum(static_cast<unsigned char>(letter)) != 0) throw Unknown{};
    return step(from, [letter](char found) { return found == letter; });
  }

  static bool is_digit(char letter) { return letter >= '0' && letter <= '9'; }
  static bool is_word(char letter) {
    return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_';
  }

  // Reads up to the closing bracket.
  struct Class {
    std::bitset<256> letters;
    bool operator()(char letter) const { return letters[static_cast<unsigned char>(letter)]; }
  };
  Class character_class() {
    Class found;
    const bool inverse = skip('^');
    while (!skip(']')) {
      char first = next();
      if (first == '\\') {
        first = next();
        if (first == 'd') {
          for (char digit = '0'; digit <= '9'; ++digit) found.letters.set(uint8_t(digit));
          continue;
        }
        if (std::isalnum(static_cast<unsigned char>(first)) != 0) throw Unknown{};
      }
      char last = first;
      if (skip('-')) last = is_at(']') ? '-' : next();
      if (last == '-' && first != '-') {
        found.letters.set(uint8_t('-'));
        last = first;
      }
      for (int letter = uint8_t(first); letter <= uint8_t(last); ++letter) {
        found.letters.set(static_cast<size_t>(letter));
      }
    }
    if (inverse) found.letters.flip();
    return found;
  }

  template <class Accepts>
  Positions step(const Positions& from, const Accepts& accepts) const {
    Positions reached;
    for (size_t i = 0; i < text_.size(); ++i) {
      if (from[i] && accepts(text_[i])) reached.set(i + 1);
    }
    return reached;
  }

  std::string_view expression_;
  std::string_view text_;
  size_t at_ = 0;
  int depth_ = 0;
  int steps_left_ = kMaxSteps;
};

}  // namespace

std::optional<bool> matches(std::string_view expression, std::string_view text) {
  if (expression.size() > kMaxExpression || text.size() > kMaxText) return std::nullopt;
  try {
    return Matcher(expression, text).run().any();
  } catch (const Unknown&) {
    return std::nullopt;
  }
}

const std::vector<std::string>& expert_modules() {
  static const std::vector<std::string> names = [] {
    constexpr std::array kTrunks = {"model.layers.", "model.language_model.layers.",
                                    "language_model.model.layers."};
    constexpr std::array kBlocks = {".mlp.", ".block_sparse_moe.", ".feed_forward."};
    constexpr std::array kMatrices = {"gate_proj", "up_proj", "down_proj", "w1", "w3", "w2"};
    std::vector<std::string> all;
    for (const char* trunk : kTrunks) {
      for (const char* layer : {"1", "4", "20"}) {
        for (const char* block : kBlocks) {
          for (const char* matrix : kMatrices) {
            all.push_back(std::string(trunk) + layer + block + "experts.1." + matrix);
          }
        }
      }
    }
    return all;
  }();
  return names;
}

}  // namespace conclave::inline v0::checkpoint
