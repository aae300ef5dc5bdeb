// Layers that go from some ranks of a launch to others, with ranks of any kind.
#pragma once

#include "support/layer_fixture.h"

#include "conclave/comm.h"
#include "conclave/refit.h"
#include "conclave/regroup.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace conclave::testing {

// Ranks of everyone that have the layer, and those that are to have it, in their new order.
struct RankChange {
  std::string name;
  int32_t everyone = 0;
  std::vector<int32_t> before;
  std::vector<int32_t> after;
};

inline std::vector<RankChange> rank_changes() {
  return {{"2 to 3", 3, {0, 1}, {0, 1, 2}},     {"3 to 2", 3, {0, 1, 2}, {0, 2}},
          {"4 to 1", 4, {0, 1, 2, 3}, {2}},     {"1 to 4", 4, {1}, {0, 1, 2, 3}},
          {"2 to 2 others", 4, {0, 1}, {2, 3}}, {"3 to 3, one other", 4, {0, 1, 2}, {0, 2, 3}}};
}

// The place of `rank` in a list, or -1.
inline int32_t place_in(const std::vector<int32_t>& ranks, int32_t rank) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == rank) return static_cast<int32_t>(i);
  }
  return -1;
}

// One rank of a change: its communicators, null where it is in no such group.
struct ChangingRank {
  const RankChange& change;
  Communicator& everyone;
  Communicator* before = nullptr;
  Communicator* after = nullptr;

  int32_t old_rank() const { return place_in(change.before, everyone.rank()); }
  int32_t next_rank() const { return place_in(change.after, everyone.rank()); }
};

// A context for ranks that need a communicator, or for one alone.
inline ContextOptions context_of(Communicator* ranks) {
  ContextOptions options;
  options.num_threads = 1;
  options.communicator = ranks != nullptr && ranks->size() > 1 ? ranks : nullptr;
  return options;
}

struct RegroupCase {
  MoeSpec spec;
  LayerOptions options = {.max_tokens = 32};
  int32_t replicas = 0;
  RegroupOptions regroup = {};  // everyone is filled in
  // Called on ranks that have the layer before it changes.
  std::function<void(MoeLayer&)> prepare = {};
};

// The layer before, through the change, with the bits of one rank on all that have it: before,
// afterwards, and before once more, which nothing has changed.
inline void expect_change(const RegroupCase& given, const ChangingRank& rank) {
  SCOPED_TRACE(rank.change.name + ", rank " + std::to_string(rank.everyone.rank()));
  const Tensor hidden = random_tensor(DType::kBF16, 21, given.spec.hidden_size, 5);
  const auto whole = make_layer(given.spec, given.options);
  const Tensor expected = run_layer(whole.layer, hidden.view(), DType::kBF16).out;
  const auto expect_right = [&](const MoeLayer& layer, const char* when) {
    EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kBF16).out, expected)) << when;
  };
  const Context old_context(context_of(rank.before));
  const Context next_context(context_of(rank.after));
  std::optional<MoeLayer> before;
  if (rank.old_rank() >= 0) {
    const auto source = make_synthetic_source(given.spec, 11);
    before.emplace(MoeLayer::create(old_context, given.spec, *source, given.options,
                                    {.ep_size = static_cast<int32_t>(rank.change.before.size()),
                                     .ep_rank = rank.old_rank(),
                                     .num_redundant_experts = given.replicas}));
    if (given.prepare) given.prepare(*before);
    expect_right(*before, "before");
  }
  RegroupOptions options = given.regroup;
  options.everyone = &rank.everyone;
  std::optional<MoeLayer> after;
  if (rank.next_rank() < 0) {
    hand_over(*before, options);
  } else if (before) {
    after.emplace(regroup(*before, next_context, options));
  } else {
    after.emplace(join_layer(next_context, given.spec, given.options, options));
  }
  if (after) {
    expect_right(*after, "afterwards");
    EXPECT_EQ(after->parallel().ep_size, static_cast<int32_t>(rank.change.after.size()));
    EXPECT_EQ(after->parallel().ep_rank, rank.next_rank());
    if (rank.change.after.size() == 1) {
      EXPECT_EQ(Refit::content_hash(*after), Refit::content_hash(whole.layer));
    }
  }
  if (before) expect_right(*before, "before, once more");
  before.reset();
  if (after) expect_right(*after, "alone");
}

}  // namespace conclave::testing
