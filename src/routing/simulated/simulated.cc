#include "routing/simulated/simulated.h"

#include "routing/rows.h"
#include "routing/score.h"
#include "routing/select.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

namespace conclave::inline v0::routing {
namespace {

// SplitMix64's finaliser: (seed, token, expert) alone determines the word, so that chunks and
// threads cannot matter (Steele, Lea, Flood 2014).
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

// Lies in (0, 1) and never at an end: a logarithm follows.
double unit(uint64_t word) { return (static_cast<double>(word >> 12) + 0.5) * 0x1p-52; }

class SimulatedRouter final : public Router {
 public:
  explicit SimulatedRouter(const MoeSpec& spec)
      : options_(spec.router.simulated),
        num_experts_(spec.num_experts),
        top_k_(spec.top_k),
        stream_(mix(options_.seed)) {
    if (options_.distribution != SimulatedDistribution::kZipf) return;
    for (int64_t rank = 0; rank < num_experts_; ++rank) {
      log_odds_.push_back(-options_.zipf_exponent * std::log(static_cast<double>(rank + 1)));
    }
  }

  size_t scratch_bytes(int32_t workers) const override {
    return scratch_bytes_of(scratch_doubles(), workers);
  }

  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor& executor) const override {
    return route_rows(input, scratch_doubles(), executor, [&](int64_t token, double* scratch) {
      int32_t* ids = output.topk_ids + token * top_k_;
      float* weights = output.topk_weights + token * top_k_;
      std::fill_n(weights, top_k_, 1.0F / static_cast<float>(top_k_));
      if (input.given_ids != nullptr) {
        std::copy_n(input.given_ids + token * top_k_, top_k_, ids);
      } else if (options_.distribution == SimulatedDistribution::kReplay) {
        replay(input.first_token + token, ids, weights);
      } else {
        draw(input.first_token + token, bans_of(input, token), scratch, ids);
      }
      return true;
    });
  }

 private:
  int64_t scratch_doubles() const { return num_experts_ + top_k_; }

  static const uint8_t* bans_of(const RouterInput& input, int64_t token) {
    return input.banned != nullptr ? input.banned + token * input.banned_stride : nullptr;
  }

  void replay(int64_t number, int32_t* ids, float* weights) const {
    const int64_t rows = static_cast<int64_t>(options_.replay_ids.size()) / top_k_;
    const int64_t first = number % rows * top_k_;
    std::copy_n(options_.replay_ids.begin() + first, top_k_, ids);
    if (options_.replay_weights.empty()) return;
    std::copy_n(options_.replay_weights.begin() + first, top_k_, weights);
  }

  // Draws one random key per expert; the k best are distinct. With Gumbel noise on log odds the
  // best is drawn with these odds, the second from the rest with theirs, and so on.
  void draw(int64_t number, const uint8_t* banned, double* scratch, int32_t* ids) const {
    const uint64_t token = mix(stream_ ^ mix(static_cast<uint64_t>(number)));
    for (int64_t expert = 0; expert < num_experts_; ++expert) {
      const bool is_banned = banned != nullptr && banned[expert] != 0;
      scratch[expert] =
          is_banned ? kAbsent : key(expert, mix(token ^ static_cast<uint64_t>(expert)));
    }
    select_best(scratch, num_experts_, top_k_, ids, scratch + num_experts_);
  }

  double key(int64_t expert, uint64_t word) const {
    const double u = unit(word);
    switch (options_.distribution) {
      case SimulatedDistribution::kNormal:
        // Box-Muller transform.
        return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * unit(mix(word)));
      case SimulatedDistribution::kZipf:
        return log_odds_[static_cast<size_t>(expert)] - std::log(-std::log(u));
      case SimulatedDistribution::kUniform:
      case SimulatedDistribution::kReplay:
        break;
    }
    return u;
  }

  SimulatedRouting options_;
  int64_t num_experts_;
  int64_t top_k_;
  uint64_t stream_;
  std::vector<double> log_odds_;  // for kZipf
};

}  // namespace

bool simulated_recalls(const MoeSpec& spec) {
  return spec.router.simulated.distribution == SimulatedDistribution::kReplay;
}

Support simulated_supports(const MoeSpec& spec) {
  const SimulatedRouting& simulated = spec.router.simulated;
  if (spec.top_k < 1 || spec.top_k > spec.num_experts) {
    return Support::no("top_k is " + std::to_string(spec.top_k) + ", not between 1 and the " +
                       std::to_string(spec.num_experts) + " experts");
  }
  if (simulated.distribution != SimulatedDistribution::kReplay) return Support::yes();
  const size_t ids = simulated.replay_ids.size();
  if (ids != 0 && ids % static_cast<size_t>(spec.top_k) == 0) return Support::yes();
  return Support::no("replay_ids are " + std::to_string(ids) + " ids, not whole rows of " +
                     std::to_string(spec.top_k));
}

std::unique_ptr<Router> make_simulated_router(const MoeSpec& spec) {
  return std::make_unique<SimulatedRouter>(spec);
}

}  // namespace conclave::inline v0::routing
