#include "bench/routing_ring.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <string>

namespace conclave::tool {
namespace {

std::vector<int32_t> permutation(int64_t count, std::mt19937_64& random) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  std::shuffle(values.begin(), values.end(), random);
  return values;
}

// The number lies in (0, 1], so that its logarithm is finite.
double unit(std::mt19937_64& random) { return (static_cast<double>(random() >> 11) + 1) * 0x1p-53; }

}  // namespace

RoutingChoice parse_routing(std::string_view text) {
  if (text == "uniform") return {.pattern = RoutingPattern::kUniform};
  if (text == "one") return {.pattern = RoutingPattern::kOne};
  if (text == "gate") return {.pattern = RoutingPattern::kGate};
  if (text == "zipf") return {.pattern = RoutingPattern::kZipf};
  constexpr std::string_view kPrefix = "zipf:";
  if (text.starts_with(kPrefix)) {
    const std::string_view number = text.substr(kPrefix.size());
    double exponent = 0;
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), exponent);
    const bool whole = error == std::errc() && end == number.data() + number.size();
    if (whole && exponent >= 0 && exponent <= 10) {
      return {.pattern = RoutingPattern::kZipf, .zipf_exponent = exponent};
    }
  }
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "unknown routing pattern",
               .tensor = "--routing",
               .expected = "uniform, zipf:X with X from 0 to 10, one, or gate",
               .found = fmt::format("'{}'", text)});
}

RoutingRing::RoutingRing(const MoeSpec& spec, int64_t num_layers, RoutingChoice choice,
                         uint64_t seed)
    : num_experts_(spec.num_experts), top_k_(spec.top_k), choice_(choice), random_(seed) {
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    rings_.push_back(permutation(num_experts_, random_));
  }
  positions_.assign(static_cast<size_t>(num_layers), 0);
}

BenchCall RoutingRing::next(int64_t num_tokens) {
  BenchCall call;
  call.layer = calls_++ % static_cast<int64_t>(rings_.size());
  if (choice_.pattern == RoutingPattern::kGate) return call;
  call.topk_ids = draw(num_tokens);
  call.experts_hit = relabel(call.topk_ids, call.layer);
  call.topk_weights.resize(call.topk_ids.size());
  for (int64_t token = 0; token < num_tokens; ++token) {
    const auto begin = call.topk_weights.begin() + token * top_k_;
    std::generate_n(begin, top_k_, [this] { return static_cast<float>(unit(random_)); });
    const float sum = std::accumulate(begin, begin + top_k_, 0.0F);
    std::for_each_n(begin, top_k_, [sum](float& weight) { weight /= sum; });
  }
  return call;
}

std::vector<int32_t> RoutingRing::draw(int64_t num_tokens) {
  std::vector<int32_t> ids(static_cast<size_t>(num_tokens * top_k_));
  switch (choice_.pattern) {
    case RoutingPattern::kUniform:
      draw_uniform(ids, num_tokens);
      break;
    case RoutingPattern::kZipf:
      draw_zipf(ids, num_tokens);
      break;
    case RoutingPattern::kOne:
      for (size_t i = 0; i < ids.size(); ++i) {
        ids[i] = static_cast<int32_t>(i % static_cast<size_t>(top_k_));
      }
      break;
    case RoutingPattern::kGate:
      break;
  }
  return ids;
}

// Takes the first k places of a shuffle, which continues from the deck that the last token left.
void RoutingRing::draw_uniform(std::vector<int32_t>& ids, int64_t num_tokens) {
  std::vector<int32_t> deck = permutation(num_experts_, random_);
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t slot = 0; slot < top_k_; ++slot) {
      const uint64_t left = static_cast<uint64_t>(num_experts_ - slot);
      const size_t pick = static_cast<size_t>(slot) + random_() % left;
      std::swap(deck[static_cast<size_t>(slot)], deck[pick]);
      ids[static_cast<size_t>(token * top_k_ + slot)] = deck[static_cast<size_t>(slot)];
    }
  }
}

// Gumbel's trick: the k largest of log(weight) + noise are a weighted draw without replacement.
void RoutingRing::draw_zipf(std::vector<int32_t>& ids, int64_t num_tokens) {
  std::vector<std::pair<double, int32_t>> keys(static_cast<size_t>(num_experts_));
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (size_t expert = 0; expert < keys.size(); ++expert) {
      const double log_weight =
          -choice_.zipf_exponent * std::log(static_cast<double>(expert) + 1.0);
      keys[expert] = {log_weight - std::log(-std::log(unit(random_) * (1 - 0x1p-52))),
                      static_cast<int32_t>(expert)};
    }
    std::partial_sort(keys.begin(), keys.begin() + top_k_, keys.end(), std::greater<>());
    for (int64_t slot = 0; slot < top_k_; ++slot) {
      ids[static_cast<size_t>(token * top_k_ + slot)] = keys[static_cast<size_t>(slot)].second;
    }
  }
}

// Gives the distinct experts drawn the next places on the layer's ring; returns their number.
int64_t RoutingRing::relabel(std::vector<int32_t>& ids, int64_t layer) {
  std::vector<int32_t> label(static_cast<size_t>(num_experts_), -1);
  const std::vector<int32_t>& ring = rings_[static_cast<size_t>(layer)];
  int64_t& position = positions_[static_cast<size_t>(layer)];
  int64_t hit = 0;
  for (int32_t& id : ids) {
    int32_t& mapped = label[static_cast<size_t>(id)];
    if (mapped < 0) mapped = ring[static_cast<size_t>((position + hit++) % num_experts_)];
    id = mapped;
  }
  position = (position + hit) % num_experts_;
  return hit;
}

}  // namespace conclave::tool
