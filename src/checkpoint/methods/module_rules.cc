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

  // How often an atom may follow itself.
  struct Count {
    int least = 1;
    int most = 1;
  };

  Count count() {
    constexpr int kAny = static_cast<int>(kMaxText) + 1;  // each but the first moves on
    Count found;
    if (skip('*')) {
      found = {.least = 0, .most = kAny};
    } else if (skip('+')) {
      found = {.least = 1, .most = kAny};
    } else if (skip('?')) {
      found = {.least = 0, .most = 1};
    } else if (skip('{')) {
      found.least = number();
      found.most = !skip(',') ? found.least : is_at('}') ? kAny : number();
      if (!skip('}') || found.most < found.least) throw Unknown{};
    } else {
      return found;
    }
    skip('?');  // lazy repeats reach the same positions
    return found;
  }

  int number() {
    int value = 0;
    const size_t begin = at_;
    while (at_ < expression_.size() && is_digit(expression_[at_])) {
      value = value * 10 + (next() - '0');
      if (value > static_cast<int>(kMaxText)) throw Unknown{};
    }
    if (at_ == begin) throw Unknown{};
    return value;
  }

  Positions repeated(const Positions& from) {
    const size_t begin = at_;
    Positions last = atom(from);
    const Count times = count();
    const size_t end = at_;
    if (times.most == 0) return from;
    Positions all = times.least == 0 ? from | last : times.least == 1 ? last : Positions();
    for (int n = 2; n <= times.most && last.any(); ++n) {
      at_ = begin;
      last = atom(last) & ~all;
      if (n >= times.least) all |= last;
    }
    at_ = end;
    return all;
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
    if (skip('?') && !skip(':')) {
      if (skip('=')) return can_go_on(from);
      if (skip('!')) return from & ~can_go_on(from);
      throw Unknown{};
    }
    const Positions reached = alternatives(from);
    if (!skip(')')) throw Unknown{};
    return reached;
  }

  // The positions from which the rest of the group matches.
  Positions can_go_on(const Positions& from) {
    const size_t begin = at_;
    alternatives({});  // passes the group also where there is no position
    const size_t end = at_;
    Positions found;
    for (size_t i = 0; i <= text_.size(); ++i) {
      at_ = begin;
      if (from[i] && alternatives(Positions(1) << i).any()) found.set(i);
    }
    at_ = end;
    if (!skip(')')) throw Unknown{};
    return found;
  }

  Positions escaped(const Positions& from, char letter) {
    if (letter == 'd') return step(from, is_digit);
    if (letter == 'w') return step(from, is_word);
    if (letter == 'b') return from & word_ends();
    if (std::isalnum(static_cast<unsigned char>(letter)) != 0) throw Unknown{};
    return step(from, [letter](char found) { return found == letter; });
  }

  // Positions between a letter of words and none.
  Positions word_ends() const {
    Positions found;
    bool was_word = false;
    for (size_t i = 0; i <= text_.size(); ++i) {
      const bool word = i < text_.size() && is_word(text_[i]);
      if (word != was_word) found.set(i);
      was_word = word;
    }
    return found;
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
