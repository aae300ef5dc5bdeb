// Whatever goes wrong while a layer goes to other ranks, every rank has a typed error within the
// deadline, and the layer before is as it was.
#include "layer/faulty_communicator.h"
#include "layer/moving_layers.h"
#include "support/regroup_ranks.h"
#include "support/thread_ranks.h"

#include "conclave/migration.h"
#include "conclave/regroup.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::code_of;
using testing::FaultyCommunicator;
using testing::make_layer;
using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;
using Clock = std::chrono::steady_clock;
using Group = std::vector<std::unique_ptr<Communicator>>;

constexpr int32_t kNewcomer = 2;

// Two ranks that have a layer, and one that is to join.
class RegroupErrors : public ::testing::Test {
 protected:
  struct Rank {
    int32_t rank = 0;
    Communicator& everyone;
    Communicator& after;
    MoeLayer* before = nullptr;  // null on the newcomer
    Context& context;            // for the new group
  };

  // Takes the layer to the new group. Options may differ from rank to rank.
  MoeLayer go(const Rank& rank, const RegroupOptions& options) const {
    return rank.before != nullptr ? regroup(*rank.before, rank.context, options)
                                  : join_layer(rank.context, spec_, kOptions, options);
  }

  // Calls body on each rank; the layer before is right afterwards.
  void on_ranks(std::chrono::nanoseconds timeout, const std::function<void(const Rank&)>& body) {
    const auto source = make_synthetic_source(spec_, 11);
    const Tensor hidden = random_tensor(DType::kBF16, 9, 40, 5);
    const Tensor expected =
        run_layer(make_layer(spec_, kOptions).layer, hidden.view(), DType::kBF16).out;
    const Group before = make_local_group({.num_ranks = 2, .timeout = 30s});
    const Group after = make_local_group({.num_ranks = 3, .timeout = timeout});
    const auto outcomes = testing::run_ranks(
        make_local_group({.num_ranks = 3, .timeout = timeout}),
        [&](int32_t rank, Communicator& everyone) {
          const auto at = static_cast<size_t>(rank);
          Context context({.num_threads = 1, .communicator = after[at].get()});
          if (rank == kNewcomer) {
            body({.rank = rank, .everyone = everyone, .after = *after[at], .context = context});
            return;
          }
          const Context narrow({.num_threads = 1, .communicator = before[at].get()});
          MoeLayer layer =
              MoeLayer::create(narrow, spec_, *source, kOptions, {.ep_size = 2, .ep_rank = rank});
          body({.rank = rank,
                .everyone = everyone,
                .after = *after[at],
                .before = &layer,
                .context = context});
          EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kBF16).out, expected));
        });
    EXPECT_EQ(testing::first_failure(outcomes), "");
  }

  // Every rank asks as `change` says, is refused, and can go on the next time.
  void expect_refused(const std::function<void(int32_t, RegroupOptions&)>& change,
                      const std::function<void(int32_t, const Error&)>& check) {
    on_ranks(30s, [&](const Rank& rank) {
      RegroupOptions options{.everyone = &rank.everyone};
      change(rank.rank, options);
      try {
        go(rank, options);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        check(rank.rank, error);
      }
      EXPECT_NO_THROW(go(rank, {.everyone = &rank.everyone}));
    });
  }

  static constexpr int32_t kSpare = 1;
  const LayerOptions kOptions{.max_tokens = 32, .spare_experts = kSpare};
  MoeSpec spec_ = make_spec(6, 2, 40, 24, DType::kBF16);
};

struct DeathCase {
  const char* phase;
  int32_t after;  // waits of that phase
};

class RegroupDeaths : public RegroupErrors, public ::testing::WithParamInterface<DeathCase> {};

// The newcomer dies at some wait: its communicators are gone.
TEST_P(RegroupDeaths, OthersNameIt_AndServeOn) {
  on_ranks(10s, [&](const Rank& rank) {
    const auto begin = Clock::now();
    if (rank.rank == kNewcomer) {
      int32_t waits = 0;
      FaultyCommunicator dying(rank.everyone, [&](std::string_view phase, std::span<std::byte>) {
        if (phase != GetParam().phase || waits++ != GetParam().after) return;
        throw CommError(ErrorCode::kCommAborted, kNewcomer, std::string(phase), "this rank dies");
      });
      EXPECT_EQ(code_of([&] { go(rank, {.everyone = &dying}); }), ErrorCode::kCommAborted);
      rank.after.abort("rank 2 is dead");
      return;  // run_ranks destroys its communicator
    }
    try {
      go(rank, {.everyone = &rank.everyone});
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kCommPeerLost ||
                  error.code() == ErrorCode::kCommAborted)
          << error.what();
    }
    EXPECT_LT(Clock::now() - begin, 9s);
  });
}
INSTANTIATE_TEST_SUITE_P(Waits, RegroupDeaths,
                         ::testing::Values(DeathCase{"regroup: agree on the request", 0},
                                           DeathCase{"regroup: tell where experts are", 0},
                                           DeathCase{"regroup: tell where experts are", 2},
                                           DeathCase{"regroup: wait for the others", 1},
                                           DeathCase{"regroup: wait for the others", 2},
                                           DeathCase{"migration: copy experts", 0},
                                           DeathCase{"migration: copy experts", 1},
                                           DeathCase{"migration: compare the hashes", 0},
                                           DeathCase{"regroup: wait for the others", 4}));

TEST_F(RegroupErrors, NewcomerThatNeverComes_IsLateAtTheDeadline) {
  std::atomic<int> named{0};
  std::atomic<bool> is_over{false};
  on_ranks(300ms, [&](const Rank& rank) {
    if (rank.rank == kNewcomer) {
      while (!is_over) std::this_thread::sleep_for(5ms);
      return;
    }
    const auto begin = Clock::now();
    try {
      go(rank, {.everyone = &rank.everyone});
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_LT(Clock::now() - begin, 5s);
      if (error.peer() == kNewcomer) ++named;
    }
    is_over = named > 0;
  });
  EXPECT_GT(named, 0);
}

// One bit of one piece is damaged on its way to the newcomer: of an expert, which come first, or
// of what every rank has, which comes last.
TEST_F(RegroupErrors, DamagedCopy_IsAMismatchOnEveryRank) {
  constexpr int32_t kNone = -1;
  int32_t all_pieces = 0;
  const auto go_damaged = [&](const Rank& rank, int32_t damaged) {
    int32_t pieces = 0;
    FaultyCommunicator damaging(rank.everyone,
                                [&](std::string_view phase, std::span<std::byte> received) {
                                  if (rank.rank != kNewcomer || phase != "migration: copy experts")
                                    return;
                                  if (pieces++ == damaged) received[0] ^= std::byte{1};
                                });
    go(rank, {.everyone = &damaging, .piece_bytes = 4096});
    if (rank.rank == kNewcomer) all_pieces = pieces;
  };
  on_ranks(30s, [&](const Rank& rank) { go_damaged(rank, kNone); });
  ASSERT_GT(all_pieces, 2);
  for (const int32_t damaged : {0, all_pieces - 1}) {
    SCOPED_TRACE(damaged);
    on_ranks(30s, [&](const Rank& rank) {
      EXPECT_EQ(code_of([&] { go_damaged(rank, damaged); }), ErrorCode::kCommMismatch);
      EXPECT_NO_THROW(go_damaged(rank, kNone));
    });
  }
}

TEST_F(RegroupErrors, RanksThatWereAskedDifferentThings_Disagree) {
  expect_refused(
      [](int32_t rank, RegroupOptions& options) {
        if (rank == 1) options.piece_bytes = 8192;
      },
      [](int32_t, const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCommMismatch);
        EXPECT_NE(std::string(error.what()).find("piece_bytes"), std::string::npos);
      });
}

TEST_F(RegroupErrors, WhatOneRankCannotDo_ItSays_AndTheOthersLearn) {
  expect_refused(
      [](int32_t rank, RegroupOptions& options) {
        if (rank == 0) options.processor_share = 0;
      },
      [](int32_t rank, const Error& error) {
        if (rank == 0) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
          EXPECT_EQ(error.detail().tensor, "processor_share");
        } else {
          EXPECT_EQ(error.code(), ErrorCode::kCommMismatch);
        }
      });
}

TEST_F(RegroupErrors, SplitOfOtherSlices_IsRefused) {
  expect_refused(
      [](int32_t rank, RegroupOptions& options) {
        options.parallel = ParallelSpec{.ep_size = 3, .ep_rank = rank};
        if (rank == 1) options.parallel->tp_size = 2;
      },
      [](int32_t rank, const Error& error) {
        EXPECT_EQ(error.code(), rank == 1 ? ErrorCode::kUnsupported : ErrorCode::kCommAborted);
      });
}

TEST_F(RegroupErrors, NewRanksThatAreNotEachThereOnce_AreNamedOnEveryRank) {
  for (const int32_t wrong : {0, 7}) {
    expect_refused(
        [wrong](int32_t rank, RegroupOptions& options) {
          options.parallel = ParallelSpec{.ep_size = 3, .ep_rank = rank};
          if (rank == 1 && wrong == 0) options.parallel->ep_rank = 0;
          if (rank == 1 && wrong != 0) options.parallel->ep_size = wrong;
        },
        [](int32_t, const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
          EXPECT_EQ(error.detail().tensor, "context");
        });
  }
}

TEST_F(RegroupErrors, RankNumberOutsideTheGroup_IsNamedOnEveryRank) {
  for (const int32_t wrong : {-5, 3}) {
    expect_refused(
        [wrong](int32_t rank, RegroupOptions& options) {
          options.parallel = ParallelSpec{.ep_size = 3, .ep_rank = rank == 1 ? wrong : rank};
        },
        [](int32_t, const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
          EXPECT_EQ(error.detail().tensor, "context");
        });
  }
}

TEST_F(RegroupErrors, NewcomerOfAnotherSpec_IsTold) {
  on_ranks(30s, [&](const Rank& rank) {
    MoeSpec other = spec_;
    other.top_k = 3;
    try {
      if (rank.rank == kNewcomer) {
        join_layer(rank.context, other, kOptions, {.everyone = &rank.everyone});
      } else {
        go(rank, {.everyone = &rank.everyone});
      }
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommMismatch);
      EXPECT_NE(std::string(error.what()).find("top_k"), std::string::npos) << error.what();
    }
  });
}

TEST_F(RegroupErrors, LayerWhoseExpertsAreOnTheirWay_Waits) {
  auto second = make_local_group({.num_ranks = 2, .timeout = 30s});
  on_ranks(30s, [&](const Rank& rank) {
    std::optional<Migration> migration;
    if (rank.before != nullptr) {
      ExpertSlots slots = rank.before->slots();
      std::swap(slots.logical_of.front(), slots.logical_of.back());
      migration.emplace(
          *rank.before, slots,
          MigrationOptions{.communicator = second[static_cast<size_t>(rank.rank)].get()});
    }
    EXPECT_EQ(code_of([&] { go(rank, {.everyone = &rank.everyone}); }),
              rank.before != nullptr ? ErrorCode::kState : ErrorCode::kCommMismatch);
    if (migration) migration->finish();
    migration.reset();
    EXPECT_NO_THROW(go(rank, {.everyone = &rank.everyone}));
  });
}

TEST(RegroupAlone, WrongRequests_AreRefused) {
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const auto source = make_synthetic_source(spec, 11);
  const Context context({.num_threads = 1});
  const MoeLayer layer = MoeLayer::create(context, spec, *source);
  auto everyone = std::move(make_local_group({.num_ranks = 1}).front());
  const auto refused = [&](const auto& call, ErrorCode code, const char* text) {
    try {
      call();
      ADD_FAILURE() << "no error: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused([&] { regroup(layer, context, {}); }, ErrorCode::kInvalidArgument, "everyone");
  refused([&] { hand_over(layer, {.everyone = everyone.get()}); }, ErrorCode::kInvalidArgument,
          "every rank leaves");
  refused([&] { join_layer(context, spec, {}, {.everyone = everyone.get()}); },
          ErrorCode::kInvalidArgument, "no rank has the layer");
  const MoeLayer part =
      MoeLayer::create(context, spec, *source, {}, {.ep_size = 2, .reduce = Reduce::kPartial});
  refused([&] { regroup(part, context, {.everyone = everyone.get()}); }, ErrorCode::kUnsupported,
          "kPartial");
  EXPECT_NO_THROW(regroup(layer, context, {.everyone = everyone.get()}));
}

}  // namespace
}  // namespace conclave
