// Limits of a call's choices: fewer experts for each token, banned experts, a budget for the batch.

#include "routing/limits.h"
#include "routing/router_cases.h"
#include "support/layer_parts.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"
#include "conclave/token_router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::LayerOutput;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

constexpr int64_t kTokens = 19;

// Bans as tests write them: rows of flags, one or one a token.
struct Flags {
  std::vector<uint8_t> values;
  int64_t columns = 0;

  static Flags of(int64_t columns, const std::set<int64_t>& banned, int64_t rows = 1) {
    Flags flags{.values = std::vector<uint8_t>(static_cast<size_t>(columns * rows)),
                .columns = columns};
    for (int64_t row = 0; row < rows; ++row) {
      for (const int64_t id : banned) flags.values[static_cast<size_t>(row * columns + id)] = 1;
    }
    return flags;
  }
  ConstTensorView for_all() const {
    return {.data = values.data(), .dtype = DType::kBool, .shape = {columns}};
  }
  ConstTensorView by_token() const {
    const auto rows = static_cast<int64_t>(values.size()) / columns;
    return {.data = values.data(), .dtype = DType::kBool, .shape = {rows, columns}};
  }
};

int32_t id_at(const Tensor& ids, int64_t token, int64_t slot) {
  return ids.as<int32_t>()[token * ids.shape()[1] + slot];
}

std::set<int32_t> distinct(const Tensor& ids, int64_t slots, int64_t num_experts) {
  std::set<int32_t> found;
  for (int64_t token = 0; token < ids.shape()[0]; ++token) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int32_t id = id_at(ids, token, slot);
      if (id >= 0 && id < num_experts) found.insert(id);
    }
  }
  return found;
}

// Runs `body(rank, communicator)` on every rank of a group of threads.
template <class Body>
void on_ranks(int32_t ranks, const Body& body) {
  auto group = make_local_group({.num_ranks = ranks, .timeout = std::chrono::seconds(60)});
  EXPECT_EQ(testing::first_failure(testing::run_ranks(std::move(group), body)), "");
}

// A drawn layer of a router's row, with what its calls bring.
struct RowLayer {
  MoeSpec spec;
  OwnedLayer owned;
  Tensor hidden;
  std::vector<int32_t> token_ids;

  RowLayer(const routing::RouterRow& row, uint32_t seed)
      : spec(drawn(row, seed)), owned(make_layer(spec, {.max_tokens = 8})) {
    hidden = random_tensor(DType::kF32, kTokens, spec.hidden_size, seed);
    for (int64_t token = 0; token < kTokens; ++token) {
      token_ids.push_back(
          static_cast<int32_t>(token * 7 % std::max<int64_t>(spec.router.vocab_size, 1)));
    }
  }
  static MoeSpec drawn(const routing::RouterRow& row, uint32_t seed) {
    std::mt19937 generator(seed);
    MoeSpec spec = testing::drawn_spec(row, generator);
    spec.weight_dtype = DType::kF32;
    spec.hidden_size = 24;
    return spec;
  }
  ForwardArgs args() const {
    ForwardArgs args;
    if (spec.router.vocab_size != 0) {
      args.token_ids = {.data = token_ids.data(), .dtype = DType::kI32, .shape = {kTokens}};
    }
    return args;
  }
  StageCheck check(const LayerOutput& output, const ForwardArgs& limits) const {
    LayerResult result = output.result(hidden.const_view());
    result.token_ids = limits.token_ids;
    result.top_k = limits.top_k;
    result.banned_experts = limits.banned_experts;
    return check_against_reference(*owned.context, spec, *owned.source, result);
  }
};

// Some experts of every token, so that enough are left.
Flags some_bans(const MoeSpec& spec, int64_t choices, std::mt19937& generator) {
  const int64_t columns = spec.num_experts + spec.num_zero_experts;
  Flags flags = Flags::of(columns, {}, kTokens);
  for (int64_t token = 0; token < kTokens; ++token) {
    const auto most = static_cast<uint32_t>(columns - choices + 1);
    for (uint32_t left = static_cast<uint32_t>(generator()) % most; left > 0; --left) {
      flags.values[static_cast<size_t>(token * columns) +
                   generator() % static_cast<size_t>(columns)] = 1;
    }
  }
  return flags;
}

TEST(ChoiceLimits, EveryRouter_ObeysThemAsItsOracle) {
  for (const routing::RouterRow& row : routing::router_catalog().rows()) {
    for (uint32_t seed = 0; seed < 12; ++seed) {
      const RowLayer layer(row, seed);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + testing::describe(layer.spec));
      if (testing::may_cancel(layer.spec.router)) continue;
      std::mt19937 generator(seed);
      ForwardArgs limits = layer.args();
      limits.top_k = 1 + static_cast<int64_t>(generator() % static_cast<size_t>(layer.spec.top_k));
      const Flags bans = some_bans(layer.spec, limits.top_k, generator);
      limits.banned_experts = bans.by_token();
      const LayerOutput output =
          run_layer(layer.owned.layer, layer.hidden.view(), DType::kF32, limits);
      const StageCheck check = layer.check(output, limits);
      EXPECT_EQ(check.routing_mismatches, 0);
      EXPECT_LE(check.worst_weight_error, 1e-6);
      EXPECT_LE(check.worst_token_error, 5e-6);
      for (int64_t token = 0; token < kTokens; ++token) {
        for (int64_t slot = 0; slot < layer.spec.top_k; ++slot) {
          const int32_t id = id_at(output.ids, token, slot);
          if (slot >= limits.top_k) {
            ASSERT_EQ(id, -1);
          }
          if (id >= 0) {
            ASSERT_EQ(bans.values[static_cast<size_t>(token * bans.columns + id)], 0);
          }
        }
      }
      if (HasFailure()) return;
    }
  }
}

TEST(ChoiceLimits, FewerExperts_GiveTheBitsOfALayerThatHasFewer) {
  for (uint32_t seed = 0; seed < 24; ++seed) {
    const MoeSpec spec = testing::SpecDraw(seed).draw();
    if (spec.top_k == 1) continue;
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + testing::parts_text(spec));
    MoeSpec narrow = spec;
    narrow.top_k = 1 + seed % (spec.top_k - 1);
    const Tensor hidden = random_tensor(DType::kF32, kTokens, spec.hidden_size, seed);
    const LayerOutput few = run_layer(make_layer(spec, {.max_tokens = 8}).layer, hidden.view(),
                                      DType::kF32, {.top_k = narrow.top_k});
    const LayerOutput expected = run_layer(make_layer(narrow).layer, hidden.view(), DType::kF32);
    ASSERT_TRUE(same_bits(few.out, expected.out));
    ASSERT_TRUE(same_bits(few.logits, expected.logits));
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int64_t slot = 0; slot < narrow.top_k; ++slot) {
        ASSERT_EQ(id_at(few.ids, token, slot), id_at(expected.ids, token, slot));
      }
    }
  }
}

TEST(ChoiceLimits, ABanForAll_EqualsLogitsOfMinusInfinity) {
  MoeSpec spec = make_spec(8, 3, 24, 16, DType::kBF16);
  spec.router.score = RouterScore::kSigmoid;
  spec.router.has_selection_bias = true;
  spec.router.num_groups = 4;
  spec.router.topk_groups = 2;
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, 24, 3);
  const Flags bans = Flags::of(8, {0, 5});
  const LayerOutput banned =
      run_layer(owned.layer, hidden.view(), DType::kBF16, {.banned_experts = bans.for_all()});
  Tensor logits(DType::kF32, {kTokens, 8});
  std::copy_n(banned.logits.as<float>(), kTokens * 8, logits.as<float>());
  for (int64_t token = 0; token < kTokens; ++token) {
    for (const int64_t id : {0, 5}) {
      EXPECT_TRUE(std::isfinite(logits.as<float>()[token * 8 + id])) << "captured before the ban";
      logits.as<float>()[token * 8 + id] = -std::numeric_limits<float>::infinity();
    }
  }
  const LayerOutput masked =
      run_layer(owned.layer, hidden.view(), DType::kBF16, {.router_logits = logits.view()});
  EXPECT_TRUE(same_bits(banned.out, masked.out));
  EXPECT_TRUE(same_bits(banned.weights, masked.weights));
}

TEST(ChoiceLimits, GroupsWithTooFewExperts_LeaveSlotsEmpty) {
  MoeSpec spec = make_spec(8, 3, 24, 16, DType::kF32);
  spec.router.num_groups = 2;
  spec.router.topk_groups = 1;
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, 24, 3);
  const Flags bans = Flags::of(8, {0, 1, 4, 5, 6});
  const LayerOutput output =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.banned_experts = bans.for_all()});
  for (int64_t token = 0; token < kTokens; ++token) {
    float sum = 0;
    std::set<int32_t> chosen;
    for (int64_t slot = 0; slot < 3; ++slot) {
      chosen.insert(id_at(output.ids, token, slot));
      sum += output.weights.as<float>()[token * 3 + slot];
    }
    EXPECT_TRUE((chosen == std::set<int32_t>{-1, 2, 3} || chosen == std::set<int32_t>{-1, 7}))
        << "the other group's experts fill no slot of token " << token;
    EXPECT_NEAR(sum, 1, 1e-6) << "what is left is renormalised";
  }
}

TEST(ChoiceLimits, GivenRouting_LosesTheSlots) {
  const OwnedLayer owned = make_layer(make_spec(6, 3, 24, 16, DType::kF32));
  const Tensor hidden = random_tensor(DType::kF32, 2, 24, 3);
  const std::vector<int32_t> ids = {0, 1, 2, 3, 4, 5};
  const std::vector<float> weights = {0.5F, 0.3F, 0.2F, 0.6F, 0.3F, 0.1F};
  const Flags bans = Flags::of(6, {1, 3});
  const LayerOutput output =
      run_layer(owned.layer, hidden.view(), DType::kF32,
                {.topk_ids = {.data = ids.data(), .dtype = DType::kI32, .shape = {2, 3}},
                 .topk_weights = {.data = weights.data(), .dtype = DType::kF32, .shape = {2, 3}},
                 .top_k = 2,
                 .banned_experts = bans.for_all()});
  const std::vector<int32_t> kept(output.ids.as<int32_t>(), output.ids.as<int32_t>() + 6);
  EXPECT_EQ(kept, (std::vector<int32_t>{0, -1, -1, -1, 4, -1}));
  const std::vector<float> weighed(output.weights.as<float>(), output.weights.as<float>() + 6);
  EXPECT_EQ(weighed, (std::vector<float>{0.5F, 0, 0, 0, 0.3F, 0})) << "given weights stay";
}

// The experts that a budget keeps, computed plainly from the choices without one.
std::set<int32_t> kept_by(int64_t budget, const LayerOutput& free) {
  std::map<int32_t, double> sums;
  const int64_t slots = free.ids.shape()[1];
  for (int64_t index = 0; index < free.ids.shape()[0] * slots; ++index) {
    const int32_t id = free.ids.as<int32_t>()[index];
    if (id >= 0) sums[id] += static_cast<double>(free.weights.as<float>()[index]);
  }
  std::vector<std::pair<int32_t, double>> order(sums.begin(), sums.end());
  std::ranges::stable_sort(order, [](auto& a, auto& b) { return a.second > b.second; });
  std::set<int32_t> kept;
  for (int64_t i = 0; i < std::min<int64_t>(budget, std::ssize(order)); ++i) {
    kept.insert(order[static_cast<size_t>(i)].first);
  }
  return kept;
}

TEST(ExpertBudget, TheBatch_ChoosesAmongTheMostWeighty) {
  const MoeSpec spec = make_spec(16, 3, 24, 16, DType::kF32);
  const OwnedLayer whole = make_layer(spec);
  const OwnedLayer cut = make_layer(spec, {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kF32, kTokens, 24, 3);
  const LayerOutput free = run_layer(whole.layer, hidden.view(), DType::kF32);
  const auto used = std::ssize(distinct(free.ids, 3, 16));
  ASSERT_GT(used, 8);
  for (const int64_t budget : {int64_t{3}, int64_t{5}, int64_t{8}, int64_t{used}, int64_t{16}}) {
    SCOPED_TRACE(budget);
    const LayerOutput limited =
        run_layer(whole.layer, hidden.view(), DType::kF32, {.expert_budget = budget});
    EXPECT_LE(std::ssize(distinct(limited.ids, 3, 16)), budget);
    if (budget >= used) {
      EXPECT_TRUE(same_bits(limited.out, free.out)) << "nothing is left out";
    }
    const std::set<int32_t> kept = kept_by(budget, free);
    std::set<int64_t> banned;
    for (int64_t id = 0; id < 16; ++id) {
      if (budget < used && !kept.contains(static_cast<int32_t>(id))) banned.insert(id);
    }
    const Flags bans = Flags::of(16, banned);
    const LayerOutput expected =
        run_layer(whole.layer, hidden.view(), DType::kF32, {.banned_experts = bans.for_all()});
    EXPECT_TRUE(same_bits(limited.out, expected.out));
    EXPECT_TRUE(same_bits(limited.ids, expected.ids));
    const LayerOutput chunked =
        run_layer(cut.layer, hidden.view(), DType::kF32, {.expert_budget = budget});
    EXPECT_TRUE(same_bits(limited.out, chunked.out)) << "the budget is of all chunks together";
  }
}

TEST(ExpertBudget, EqualSums_KeepTheLowerId) {
  MoeSpec spec = make_spec(6, 2, 24, 16, DType::kF32);
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, 3, 24, 3);
  // Tokens want experts 4 5, 2 3 and 0 1, all alike.
  std::vector<float> logits(18, -9.0F);
  for (const size_t at : {4U, 5U, 8U, 9U, 12U, 13U}) logits[at] = 1.0F;
  const LayerOutput output =
      run_layer(owned.layer, hidden.view(), DType::kF32,
                {.router_logits = {.data = logits.data(), .dtype = DType::kF32, .shape = {3, 6}},
                 .expert_budget = 3});
  EXPECT_EQ(distinct(output.ids, 2, 6), (std::set<int32_t>{0, 1, 2}));
}

TEST(ExpertBudget, ZeroExperts_AreFree) {
  MoeSpec spec = make_spec(6, 2, 24, 16, DType::kF32);
  spec.num_zero_experts = 3;
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, 24, 3);
  const LayerOutput output =
      run_layer(owned.layer, hidden.view(), DType::kF32, {.expert_budget = 2});
  EXPECT_LE(std::ssize(distinct(output.ids, 2, 6)), 2);
  bool any_zero = false;
  for (int64_t i = 0; i < 2 * kTokens; ++i) any_zero |= output.ids.as<int32_t>()[i] >= 6;
  EXPECT_TRUE(any_zero);
}

TEST(ExpertBudget, TokensOfAllRanks_ShareOne) {
  const MoeSpec spec = make_spec(12, 3, 24, 16, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, 24, 3);
  const Flags bans = Flags::of(12, {7});
  const ForwardArgs limits{.banned_experts = bans.for_all(), .expert_budget = 4};
  const LayerOutput expected =
      run_layer(make_layer(spec).layer, hidden.view(), DType::kBF16, limits);
  for (const int32_t ranks : {2, 3}) {
    on_ranks(ranks, [&](int32_t rank, Communicator& communicator) {
      const Context context({.num_threads = 1, .communicator = &communicator});
      const auto source = make_synthetic_source(spec, 11);
      const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 4},
                                              {.ep_size = ranks, .ep_rank = rank});
      std::vector<int64_t> rows(rank == 0 ? 0 : kTokens);
      std::iota(rows.begin(), rows.end(), 0);
      std::erase_if(rows, [&](int64_t row) { return row % (ranks - 1) != rank - 1; });
      const Tensor mine = testing::gather_rows(hidden, rows);
      const LayerOutput output = run_layer(layer, mine.view(), DType::kBF16, limits);
      EXPECT_TRUE(same_bits(output.out, testing::gather_rows(expected.out, rows)));
    });
  }
}

TEST(ExpertBudget, RanksThatDisagree_LearnOfIt) {
  const MoeSpec spec = make_spec(12, 3, 24, 16, DType::kBF16);
  on_ranks(2, [&](int32_t rank, Communicator& communicator) {
    const Context context({.num_threads = 1, .communicator = &communicator});
    const auto source = make_synthetic_source(spec, 11);
    const MoeLayer layer =
        MoeLayer::create(context, spec, *source, {}, {.ep_size = 2, .ep_rank = rank});
    const Tensor hidden = random_tensor(DType::kBF16, 4, 24, 3);
    EXPECT_EQ(code_of([&] {
                run_layer(layer, hidden.view(), DType::kBF16, {.expert_budget = rank == 0 ? 4 : 0});
              }),
              ErrorCode::kCommMismatch);
  });
}

// Chooses expert 0 whatever it is told.
class Stubborn final : public Router {
 public:
  explicit Stubborn(int64_t top_k) : top_k_(top_k) {}
  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor&) const override {
    std::fill_n(output.topk_ids, input.num_tokens * top_k_, 0);
    std::fill_n(output.topk_weights, input.num_tokens * top_k_, 1.0F);
    return {};
  }

 private:
  int64_t top_k_;
};

TEST(ChoiceLimits, ARouterOfTheApplication_IsMadeForFewerAndHeldToBans) {
  Context context({.num_threads = 1});
  std::vector<int64_t> made;
  context.add_router("stubborn", [&](const MoeSpec& spec) {
    made.push_back(spec.top_k);
    return std::make_unique<Stubborn>(spec.top_k);
  });
  MoeSpec spec = make_spec(4, 3, 24, 16, DType::kF32);
  spec.router.name = "stubborn";
  const auto source = make_synthetic_source(spec, 11);
  const MoeLayer layer = MoeLayer::create(context, spec, *source);
  const Tensor hidden = random_tensor(DType::kF32, 2, 24, 3);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const LayerOutput few = run_layer(layer, hidden.view(), DType::kF32, {.top_k = 2});
    EXPECT_EQ(id_at(few.ids, 1, 1), 0);
    EXPECT_EQ(id_at(few.ids, 1, 2), -1);
  }
  EXPECT_EQ(made, (std::vector<int64_t>{3, 2})) << "one router for each number";
  const Flags bans = Flags::of(4, {0});
  const LayerOutput none =
      run_layer(layer, hidden.view(), DType::kF32, {.banned_experts = bans.for_all()});
  EXPECT_EQ(id_at(none.ids, 0, 0), -1);
}

// Routers for fewer choices are made by the first call that asks, here by several at once.
TEST(ChoiceLimits, ConcurrentCalls_HaveTheBitsOfOne) {
  const OwnedLayer owned = make_layer(make_spec(8, 4, 24, 16, DType::kF32));
  const Tensor hidden = random_tensor(DType::kF32, kTokens, 24, 3);
  std::vector<LayerOutput> expected;
  const OwnedLayer alone = make_layer(make_spec(8, 4, 24, 16, DType::kF32));
  for (const int64_t few : {1, 2, 3}) {
    expected.push_back(run_layer(alone.layer, hidden.view(), DType::kF32, {.top_k = few}));
  }
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&, thread] {
      Workspace workspace(*owned.context, owned.layer.workspace_bytes());
      const auto few = static_cast<int64_t>(thread % 3 + 1);
      const LayerOutput output =
          run_layer(owned.layer, hidden.view(), DType::kF32,
                    {.top_k = few, .expert_budget = 8, .workspace = &workspace});
      EXPECT_TRUE(same_bits(output.out, expected[thread % 3].out));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ChoiceLimits, TokenRouter_TakesThemToo) {
  const Context context({.num_threads = 2});
  const MoeSpec spec = make_spec(16, 3, 24, 16, DType::kF32);
  const TokenRouter router(context, spec);
  const OwnedLayer owned = make_layer(spec);
  const Tensor hidden = random_tensor(DType::kF32, kTokens, 24, 3);
  const Flags bans = Flags::of(16, {2, 3}, kTokens);
  const ForwardArgs limits{.top_k = 2, .banned_experts = bans.by_token(), .expert_budget = 4};
  const LayerOutput expected = run_layer(owned.layer, hidden.view(), DType::kF32, limits);
  Tensor ids(DType::kI32, {kTokens, 3});
  Tensor weights(DType::kF32, {kTokens, 3});
  router.route({.logits = expected.logits.view(),
                .top_k = 2,
                .banned_experts = bans.by_token(),
                .expert_budget = 4,
                .topk_ids = ids.view(),
                .topk_weights = weights.view()});
  EXPECT_TRUE(same_bits(ids, expected.ids));
  EXPECT_TRUE(same_bits(weights, expected.weights));
}

TEST(ChoiceLimits, NoTokensAndOne_Work) {
  const OwnedLayer owned = make_layer(make_spec(6, 3, 24, 16, DType::kF32));
  const Flags bans = Flags::of(6, {1});
  for (const int64_t tokens : {0, 1}) {
    const Tensor hidden = random_tensor(DType::kF32, tokens, 24, 3);
    const LayerOutput output =
        run_layer(owned.layer, hidden.view(), DType::kF32,
                  {.top_k = 2, .banned_experts = bans.for_all(), .expert_budget = 2});
    EXPECT_LE(std::ssize(distinct(output.ids, 3, 6)), 2);
  }
}

TEST(ChoiceLimits, WhatCannotBe_IsRefusedByName) {
  const OwnedLayer owned = make_layer(make_spec(6, 3, 24, 16, DType::kF32));
  const Tensor hidden = random_tensor(DType::kF32, 3, 24, 3);
  const auto refused = [&](const ForwardArgs& args, ErrorCode code, const std::string& names,
                           const std::string& limit) {
    try {
      run_layer(owned.layer, hidden.view(), DType::kF32, args);
      ADD_FAILURE() << names << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_EQ(error.detail().tensor, names);
      EXPECT_NE(std::string(error.what()).find(limit), std::string::npos) << error.what();
    }
  };
  using enum ErrorCode;
  refused({.top_k = 4}, kInvalidArgument, "top_k", "1 to 3");
  refused({.top_k = -1}, kInvalidArgument, "top_k", "1 to 3");
  refused({.expert_budget = 2}, kInvalidArgument, "expert_budget", "3 to 6");
  refused({.expert_budget = 7}, kInvalidArgument, "expert_budget", "3 to 6");
  refused({.top_k = 2, .expert_budget = 1}, kInvalidArgument, "expert_budget", "2 to 6");
  Flags four = Flags::of(6, {0, 1, 2, 3});
  refused({.banned_experts = four.for_all()}, kInvalidArgument, "banned_experts", "at least 3");
  Flags second = Flags::of(6, {}, 3);
  std::fill_n(second.values.begin() + 6, 5, uint8_t{1});
  refused({.banned_experts = second.by_token()}, kInvalidArgument, "banned_experts", "token 1");
  const Flags narrow = Flags::of(5, {});
  refused({.banned_experts = narrow.for_all()}, kShape, "banned_experts", "6");
  ConstTensorView bytes = four.for_all();
  bytes.dtype = DType::kU8;
  refused({.banned_experts = bytes}, kDType, "banned_experts", "BOOL");
  const std::vector<int32_t> ids(9, 0);
  refused(
      {.topk_ids = {.data = ids.data(), .dtype = DType::kI32, .shape = {3, 3}}, .expert_budget = 4},
      kUnsupported, "expert_budget", "brings its choices");
}

}  // namespace
}  // namespace conclave
