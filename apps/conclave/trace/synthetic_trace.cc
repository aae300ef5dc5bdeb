#include "trace/synthetic_trace.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <utility>

namespace conclave::tool {
namespace {

constexpr std::string_view kRules =
    "uniform, zipf, zipf:X with X from 0 to 10, one, or hot:N:SHARE with SHARE above 0 and below 1";

// A layer's choices are drawn at once: 1 GiB of them.
constexpr int64_t kMostChoices = int64_t{1} << 28;

// Draws of one expert that was taken already before the rest is chosen by its weight alone.
constexpr int kTries = 64;

std::optional<double> real_number(std::string_view text) {
  double value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<TraceChoice> parse(std::string_view text) {
  if (text == "uniform") return TraceChoice{.rule = TraceRule::kUniform};
  if (text == "one") return TraceChoice{.rule = TraceRule::kOne};
  if (text == "zipf") return TraceChoice{.rule = TraceRule::kZipf};
  if (text.starts_with("zipf:")) {
    const std::optional<double> exponent = real_number(text.substr(5));
    if (!exponent || !(*exponent >= 0 && *exponent <= 10)) return std::nullopt;
    return TraceChoice{.rule = TraceRule::kZipf, .exponent = *exponent};
  }
  if (!text.starts_with("hot:")) return std::nullopt;
  const std::string_view rest = text.substr(4);
  const size_t colon = rest.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::optional<double> experts = real_number(rest.substr(0, colon));
  const std::optional<double> share = real_number(rest.substr(colon + 1));
  constexpr double kMostExperts = 1 << 24;
  if (!experts || !share || !(*experts >= 1 && *experts <= kMostExperts)) return std::nullopt;
  if (*experts != std::floor(*experts) || !(*share > 0 && *share < 1)) return std::nullopt;
  return TraceChoice{
      .rule = TraceRule::kHot, .hot_experts = static_cast<int64_t>(*experts), .hot_share = *share};
}

// Draws the tokens of one layer.
class Drawer {
 public:
  Drawer(const TraceInfo& info, const SyntheticTraceOptions& options, int64_t layer)
      : choice_(options.choice),
        correlation_(options.correlation),
        experts_(info.num_experts),
        random_(options.seed + 0x9E3779B97F4A7C15U * static_cast<uint64_t>(layer + 1)),
        label_(static_cast<size_t>(experts_)),
        taken_(static_cast<size_t>(experts_), 0) {
    std::iota(label_.begin(), label_.end(), 0);
    std::shuffle(label_.begin(), label_.end(), random_);
    add_up_weights();
  }

  // `before` is the token before, or empty; both have k ids.
  void draw(std::span<const int32_t> before, std::span<int32_t> token) {
    for (size_t slot = 0; slot < token.size(); ++slot) {
      const bool kept = !before.empty() && !is_taken(before[slot]) && unit() < correlation_;
      token[slot] = kept ? before[slot] : label_[static_cast<size_t>(next(slot))];
      taken_[static_cast<size_t>(token[slot])] = 1;
    }
    for (const int32_t id : token) taken_[static_cast<size_t>(id)] = 0;
  }

 private:
  // In [0, 1).
  double unit() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  bool is_taken(int32_t id) const { return taken_[static_cast<size_t>(id)] != 0; }
  bool is_free(int64_t rank) const { return !is_taken(label_[static_cast<size_t>(rank)]); }

  double weight(int64_t rank) const {
    if (choice_.rule != TraceRule::kZipf) return 1;
    return std::pow(static_cast<double>(rank) + 1, -choice_.exponent);
  }
  void add_up_weights() {
    double sum = 0;
    for (int64_t rank = 0; rank < experts_; ++rank) {
      sum += weight(rank);
      up_to_.push_back(sum);
    }
  }

  // The rank of popularity of the next choice, which no slot of this token has.
  int64_t next(size_t slot) {
    if (choice_.rule == TraceRule::kOne) return first_free(static_cast<int64_t>(slot), experts_);
    if (choice_.rule != TraceRule::kHot) return draw_in(0, experts_);
    const bool hot = unit() < choice_.hot_share;
    const auto [begin, end] =
        hot ? std::pair{int64_t{0}, choice_.hot_experts} : std::pair{choice_.hot_experts, experts_};
    // A token with more choices than one side has experts takes the others of the other side.
    if (has_free(begin, end)) return draw_in(begin, end);
    return hot ? draw_in(choice_.hot_experts, experts_) : draw_in(0, choice_.hot_experts);
  }

  bool has_free(int64_t begin, int64_t end) const {
    for (int64_t rank = begin; rank < end; ++rank) {
      if (is_free(rank)) return true;
    }
    return false;
  }
  int64_t first_free(int64_t begin, int64_t end) const {
    while (begin + 1 < end && !is_free(begin)) ++begin;
    return begin;
  }

  int64_t draw_in(int64_t begin, int64_t end) {
    const double low = begin == 0 ? 0 : up_to_[static_cast<size_t>(begin - 1)];
    const double high = up_to_[static_cast<size_t>(end - 1)];
    for (int attempt = 0; attempt < kTries; ++attempt) {
      const double at = low + unit() * (high - low);
      const auto found = std::upper_bound(up_to_.begin() + begin, up_to_.begin() + end - 1, at);
      const int64_t rank = found - up_to_.begin();
      if (is_free(rank)) return rank;
    }
    return draw_among_free(begin, end);
  }

  // Skewed rules take the heavy experts first: the rest weighs next to nothing beside them.
  int64_t draw_among_free(int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t rank = begin; rank < end; ++rank) sum += is_free(rank) ? weight(rank) : 0;
    double left = unit() * sum;
    int64_t last = begin;
    for (int64_t rank = begin; rank < end; ++rank) {
      if (!is_free(rank)) continue;
      last = rank;
      left -= weight(rank);
      if (left < 0) break;
    }
    return last;
  }

  TraceChoice choice_;
  double correlation_;
  int64_t experts_;
  std::mt19937_64 random_;
  std::vector<int32_t> label_;  // the expert of each rank of popularity
  std::vector<double> up_to_;   // sums of weights
  std::vector<char> taken_;
};

[[noreturn]] void refuse(std::string what, std::string tensor, std::string expected,
                         std::string found) {
  throw Error(ErrorCode::kInvalidArgument, {.what = std::move(what),
                                            .tensor = std::move(tensor),
                                            .expected = std::move(expected),
                                            .found = std::move(found)});
}

TraceInfo with_one_batch(TraceInfo info) {
  info.batch_begin = {0};
  return info;
}

}  // namespace

TraceChoice parse_trace_choice(std::string_view text) {
  if (const std::optional<TraceChoice> choice = parse(text)) return *choice;
  refuse("unknown rule of choices", "--routing", std::string(kRules), fmt::format("'{}'", text));
}

SyntheticTrace::SyntheticTrace(TraceInfo info, SyntheticTraceOptions options)
    : RoutingTrace(with_one_batch(std::move(info))), options_(std::move(options)) {
  const int64_t experts = this->info().num_experts;
  if (this->info().top_k > experts) {
    refuse("a token cannot choose so many experts", "top_k", fmt::format("at most {}", experts),
           std::to_string(this->info().top_k));
  }
  const int64_t most_tokens = kMostChoices / this->info().top_k;
  if (this->info().num_tokens > most_tokens) {
    refuse("a layer of so many choices does not fit memory", "--trace-tokens",
           fmt::format("at most {}", most_tokens), std::to_string(this->info().num_tokens));
  }
  if (options_.choice.rule == TraceRule::kHot && options_.choice.hot_experts >= experts) {
    refuse("not all experts can be hot", "--routing", fmt::format("1 to {}", experts - 1),
           std::to_string(options_.choice.hot_experts));
  }
  if (!(options_.correlation >= 0 && options_.correlation < 1)) {
    refuse("the correlation of tokens is no chance", "--correlation", "0 or more, below 1",
           fmt::format("{}", options_.correlation));
  }
}

std::vector<int32_t> SyntheticTrace::ids(size_t position) const {
  const auto top_k = static_cast<size_t>(info().top_k);
  std::vector<int32_t> ids(static_cast<size_t>(info().num_tokens) * top_k);
  Drawer drawer(info(), options_, info().layers.at(position));
  std::span<const int32_t> before;
  for (size_t at = 0; at < ids.size(); at += top_k) {
    const std::span<int32_t> token = std::span(ids).subspan(at, top_k);
    drawer.draw(before, token);
    before = token;
  }
  return ids;
}

std::string SyntheticTrace::describe() const {
  std::string text = fmt::format("{} tokens drawn by {}, seed {}", info().num_tokens, options_.text,
                                 options_.seed);
  if (options_.correlation > 0) text += fmt::format(", correlation {}", options_.correlation);
  return text;
}

}  // namespace conclave::tool
