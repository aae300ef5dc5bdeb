// Refits whose ranks get the weights of one of them: all have the new ones or none, and whoever
// gives up says so, wherever the others wait for it.
#include "layer/moving_layers.h"
#include "layer/refit/rank_words.h"
#include "layer/refit_sources.h"
#include "support/role_sources.h"
#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include "conclave/broadcast_weights.h"
#include "conclave/refit.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::FailsAtRead;
using testing::first_failure;
using testing::forward;
using testing::GridRank;
using testing::make_spec;
using testing::on_grid;
using testing::random_tensor;
using testing::RankOutcome;
using testing::run_ranks;
using testing::same_bits;

// None of these tests waits so long: a rank that is not told would fail with kCommTimeout.
constexpr std::chrono::seconds kDeadline{60};

// A communicator of all ranks, whoever shares a layer.
class World {
 public:
  explicit World(int32_t size)
      : ranks_(make_local_group({.num_ranks = size, .timeout = kDeadline})) {}
  Communicator& of(int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }

 private:
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

// One rank of several, in the four ways in which its layer can be split.
struct BroadcastRank {
  int32_t rank = 0;
  int32_t size = 0;
  MoeLayer& layer;
  Communicator& ranks;  // one of them gives all others its weights
  const WeightSource* second = nullptr;
  const Tensor& before;  // what a forward has with the first weights
  const Tensor& after;
  const Tensor& hidden;
  bool shares_layer = true;

  const WeightSource* source_at(int32_t root) const { return rank == root ? second : nullptr; }
  bool has(const Tensor& expected) const { return same_bits(forward(layer, hidden), expected); }
  // Everything works once more.
  void refit_all() const {
    Refit refit(layer, {.communicator = &ranks});
    refit.stage_broadcast(ranks, source_at(1), {.root = 1});
    refit.commit();
    EXPECT_TRUE(has(after));
  }
};

struct Split {
  int32_t ep = 1;
  int32_t tp = 1;
  bool uses_own_group = false;  // the broadcast goes over the communicator of the layer
};

void on_split(const Split& split, const std::function<void(const BroadcastRank&)>& body) {
  const MoeSpec spec = make_spec(6, 2, 40, 48, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 5, 40, 5);
  World world(split.ep * split.tp);
  on_grid(split.ep, split.tp, [&](const GridRank& at) {
    const Context context(at.context_options());
    const ParallelSpec parallel = at.in({.ep_size = split.ep, .tp_size = split.tp});
    const auto second = make_synthetic_source(spec, 4);
    MoeLayer layer = MoeLayer::create(context, spec, *make_synthetic_source(spec, 3), {}, parallel);
    const MoeLayer fresh = MoeLayer::create(context, spec, *second, {}, parallel);
    const Tensor before = forward(layer, hidden);
    const Tensor after = forward(fresh, hidden);
    const int32_t rank = at.ep_rank * split.tp + at.tp_rank;
    Communicator& own = split.ep > 1 ? *at.communicator : *at.tensor_communicator;
    body({.rank = rank,
          .size = split.ep * split.tp,
          .layer = layer,
          .ranks = split.uses_own_group ? own : world.of(rank),
          .second = second.get(),
          .before = before,
          .after = after,
          .hidden = hidden});
  });
}

// Layers of their own, which nothing connects but the broadcast.
void on_replicas(int32_t count, const std::function<void(const BroadcastRank&)>& body) {
  const MoeSpec spec = make_spec(6, 2, 40, 48, DType::kBF16);
  const Tensor hidden = random_tensor(DType::kBF16, 5, 40, 5);
  for (const testing::ThreadGroups& group : testing::kThreadGroups) {
    SCOPED_TRACE(group.name);
    const auto outcomes = run_ranks(
        group.make({.num_ranks = count, .timeout = kDeadline}),
        [&](int32_t rank, Communicator& ranks) {
          const Context context({.num_threads = 1});
          const auto second = make_synthetic_source(spec, 4);
          MoeLayer layer = MoeLayer::create(context, spec, *make_synthetic_source(spec, 3));
          const MoeLayer fresh = MoeLayer::create(context, spec, *second);
          const Tensor before = forward(layer, hidden);
          const Tensor after = forward(fresh, hidden);
          body({.rank = rank,
                .size = count,
                .layer = layer,
                .ranks = ranks,
                .second = second.get(),
                .before = before,
                .after = after,
                .hidden = hidden});
          ranks.barrier("done");
        });
    EXPECT_EQ(first_failure(outcomes), "");
  }
}

void on_every_split(const std::function<void(const BroadcastRank&)>& body) {
  for (const Split& split : {Split{.ep = 3, .uses_own_group = true},
                             Split{.tp = 2, .uses_own_group = true}, Split{.ep = 2, .tp = 2}}) {
    SCOPED_TRACE(std::to_string(split.ep) + " x " + std::to_string(split.tp));
    on_split(split, body);
  }
  on_replicas(3, body);
}

// The error of another rank, with its number and its words.
template <class Body>
void expect_told(const Body& body, int32_t peer, const std::string& words) {
  try {
    body();
    ADD_FAILURE() << "nobody was told";
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCommMismatch) << error.what();
    EXPECT_EQ(error.peer(), peer) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

TEST(RefitBroadcast, AllRanks_HaveTheNewWeights) {
  on_every_split([](const BroadcastRank& at) {
    for (int32_t part = 0; part < 2; ++part) at.refit_all();
    EXPECT_EQ(at.layer.status().refit_epoch, 2U);
  });
}

// Before its first stage, between two, and before its commit; each time it is the last rank.
TEST(RefitBroadcast, RankThatWithdraws_EndsTheOthersRefitAtOnce) {
  for (const int32_t stages : {0, 1, 2}) {
    on_every_split([&](const BroadcastRank& at) {
      Refit refit(at.layer, {.scope = {.experts = {0, 1, 2, 3, 4, 5}}, .communicator = &at.ranks});
      const std::vector<RefitScope> parts = {{.experts = {0, 2, 4}}, {.experts = {5, 3, 1}}};
      const auto stage = [&](int32_t part) {
        refit.stage_broadcast(at.ranks, at.source_at(1),
                              {.root = 1, .part = parts[static_cast<size_t>(part)]});
      };
      for (int32_t part = 0; part < stages; ++part) stage(part);
      if (at.rank == at.size - 1) {
        refit.withdraw("the learning rate is gone");
      } else {
        const auto next = [&] { return stages < 2 ? stage(stages) : refit.commit(); };
        expect_told(next, at.size - 1, "has withdrawn: the learning rate is gone");
      }
      // A refit that a withdrawal has met while it staged is over; one that did commit may go on.
      if (stages < 2) {
        EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kState);
      }
      refit.rollback();
      EXPECT_TRUE(at.has(at.before));
      at.refit_all();
    });
  }
}

// The rank without a refit speaks in the place of the first stage.
TEST(RefitBroadcast, RankThatIsRefused_IsNamedWithTheReason) {
  for (const bool is_silent : {false, true}) {
    on_every_split([&](const BroadcastRank& at) {
      if (at.rank == 0) {
        RefitOptions options{.scope = {.experts = {6}}, .communicator = &at.ranks};
        if (is_silent) options.refusal = RefitRefusal::kSilent;
        EXPECT_EQ(code_of([&] { const Refit refit(at.layer, options); }),
                  ErrorCode::kInvalidArgument);
        if (is_silent) Refit::withdraw(at.layer, &at.ranks, "no such expert");
      } else {
        Refit refit(at.layer, {.communicator = &at.ranks});
        expect_told([&] { refit.stage_broadcast(at.ranks, at.source_at(1), {.root = 1}); }, 0,
                    is_silent ? "no such expert" : "RefitScope");
      }
      EXPECT_TRUE(at.has(at.before));
      at.refit_all();
    });
  }
}

// Where the layer's own ranks send the weights, nobody has to name them first.
TEST(RefitBroadcast, RankOfTheSameGroup_IsHeardWithoutBeingNamed) {
  for (const Split& split :
       {Split{.ep = 3, .uses_own_group = true}, Split{.tp = 2, .uses_own_group = true}}) {
    on_split(split, [](const BroadcastRank& at) {
      Refit refit(at.layer);
      if (at.rank == 0) {
        refit.withdraw("out of data");
      } else {
        expect_told([&] { refit.stage_broadcast(at.ranks, at.source_at(1), {.root = 1}); }, 0,
                    "out of data");
      }
      at.refit_all();
    });
  }
}

// What fails in a stage may be staged again, whoever it was.
TEST(RefitBroadcast, RankThatFailsInAStage_SaysWhyAndMayTryAgain) {
  on_every_split([](const BroadcastRank& at) {
    Refit refit(at.layer, {.communicator = &at.ranks});
    const auto stage = [&](const WeightSource* source) {
      refit.stage_broadcast(at.ranks, source, {.root = 1});
    };
    // The root's source ends midway.
    const FailsAtRead failing(*at.second, 5);
    if (at.rank == 1) {
      EXPECT_EQ(code_of([&] { stage(&failing); }), ErrorCode::kFileRead);
    } else {
      expect_told([&] { stage(nullptr); }, 1, "disk gone");
    }
    // The root finds none.
    if (at.rank == 1) {
      EXPECT_EQ(code_of([&] { stage(nullptr); }), ErrorCode::kNullPointer);
    } else {
      expect_told([&] { stage(nullptr); }, 1, "has no weights");
    }
    // Another rank has no use for them.
    if (at.rank == 0) {
      refit.refuse_broadcast(at.ranks, "no room");
    } else {
      expect_told([&] { stage(at.source_at(1)); }, 0, "cannot go on: no room");
    }
    // An argument of one rank alone.
    if (at.rank == 0) {
      EXPECT_EQ(code_of([&] { refit.stage_broadcast(at.ranks, nullptr, {.root = 9}); }),
                ErrorCode::kInvalidArgument);
    } else {
      expect_told([&] { stage(at.source_at(1)); }, 0, "BroadcastOptions.root");
    }
    stage(at.source_at(1));
    refit.commit();
    EXPECT_TRUE(at.has(at.after));
  });
}

// A rank that could not stage keeps replicas from committing that nothing else connects.
TEST(RefitBroadcast, OneRankCannotCommit_NoReplicaDoes) {
  on_replicas(3, [](const BroadcastRank& at) {
    Refit refit(at.layer);
    refit.stage_broadcast(at.ranks, at.source_at(1), {.root = 1});
    const FailsAtRead failing(*at.second, 0);
    if (at.rank == 2) {
      EXPECT_EQ(code_of([&] { refit.stage(failing); }), ErrorCode::kFileRead);
      EXPECT_EQ(code_of([&] { refit.commit(); }), ErrorCode::kFileRead);
    } else {
      expect_told([&] { refit.commit(); }, 2, "disk gone");
    }
    EXPECT_TRUE(at.has(at.before));
    if (at.rank == 2) refit.stage(*at.second);
    refit.commit();
    EXPECT_TRUE(at.has(at.after));
  });
}

TEST(RefitBroadcast, AnotherCommunicator_IsRefusedAndTold) {
  World other(2);
  on_replicas(2, [&](const BroadcastRank& at) {
    Refit refit(at.layer, {.communicator = &at.ranks});
    const auto stage = [&] {
      refit.stage_broadcast(other.of(at.rank), at.source_at(1), {.root = 1});
    };
    EXPECT_EQ(code_of(stage), ErrorCode::kInvalidArgument);
    refit.stage_broadcast(at.ranks, at.source_at(1), {.root = 1});
    refit.commit();
    EXPECT_TRUE(at.has(at.after));
  });
}

// Words have a length; no letter is cut in two.
TEST(RankWords, LongReason_ArrivesShortened) {
  const std::string letter = "\xC3\xA4";  // two bytes
  for (const std::string& first : {std::string(), std::string("x")}) {
    std::string reason = first;
    for (int i = 0; i < 400; ++i) reason += letter;
    const auto outcomes =
        run_ranks(make_local_group({.num_ranks = 2, .timeout = kDeadline}),
                  [&](int32_t rank, Communicator& ranks) {
                    exchange_words(rank == 0 ? RankIntent::kFails : RankIntent::kGoesOn,
                                   rank == 0 ? reason : "", ranks, "words");
                  });
    EXPECT_FALSE(outcomes[0].code);
    ASSERT_EQ(outcomes[1].code, ErrorCode::kCommMismatch);
    const std::string& message = outcomes[1].message;
    const size_t begin = message.find("cannot go on: " + first + letter);
    ASSERT_NE(begin, std::string::npos) << message;
    const std::string text = message.substr(begin + 14 + first.size());
    EXPECT_GT(text.size(), 200U);
    EXPECT_EQ(text.size() % 2, 0U) << "half of a letter";
  }
}

}  // namespace
}  // namespace conclave
