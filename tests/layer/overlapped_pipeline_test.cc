// Calls that are cut into micro-batches: the bits of one rank, as many exchanges on every rank, and
// errors that reach all. Shared experts run where a rank would wait.
#include "layer/split_specs.h"
#include "support/layer_fixture.h"
#include "support/rank_grid.h"
#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::make_layer;
using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

MoeSpec shared_spec() {
  MoeSpec spec = make_spec(7, 3, 40, 24, DType::kBF16);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 16};
  return spec;
}

LayerOptions micro_batches(int64_t max_tokens, int64_t from) {
  return {.max_tokens = max_tokens,
          .chunk_order = ChunkOrder::kMicroBatches,
          .micro_batch_tokens = from};
}

Tensor tokens_of(int32_t rank, int64_t count, int64_t width = 40) {
  return random_tensor(DType::kBF16, count, width, 3 + static_cast<uint64_t>(rank));
}

// What a layer of one rank makes of a rank's tokens.
class OneRank {
 public:
  explicit OneRank(const MoeSpec& spec) : alone_(make_layer(spec, {}, {.num_threads = 1})) {}
  Tensor out(const Tensor& hidden) const {
    const std::lock_guard lock(mutex_);
    return run_layer(alone_.layer, hidden.view(), DType::kBF16).out;
  }

 private:
  testing::OwnedLayer alone_;
  mutable std::mutex mutex_;  // its ranks are threads
};

// Calls body on a rank's layer; returns how each rank ended.
std::vector<testing::RankOutcome> on_layers(std::vector<std::unique_ptr<Communicator>> group,
                                            const MoeSpec& spec, const LayerOptions& options,
                                            const auto& body) {
  const auto ranks = static_cast<int32_t>(group.size());
  return testing::run_ranks(std::move(group), [&](int32_t rank, Communicator& communicator) {
    const Context context({.num_threads = 1, .communicator = &communicator});
    const auto source = make_synthetic_source(spec, 11);
    const MoeLayer layer =
        MoeLayer::create(context, spec, *source, options, {.ep_size = ranks, .ep_rank = rank});
    body(rank, layer);
  });
}

// No tokens, one, a rank without any, ranks with other numbers of them, and more than are planned.
TEST(OverlappedPipeline, AnyNumbersOfTokens_HaveTheBitsOfOneRank) {
  const MoeSpec spec = shared_spec();
  const OneRank one(spec);
  const std::vector<std::vector<int64_t>> tokens = {
      {0, 0, 0}, {1, 0, 0}, {0, 2, 1}, {4, 9, 1}, {31, 3, 0}};
  for (const testing::ThreadGroups& row : testing::kThreadGroups) {
    for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
      for (const int64_t from : {1, 5, 40}) {
        SCOPED_TRACE(std::string(row.name) + ", cut from " + std::to_string(from));
        LayerOptions options = micro_batches(8, from);
        options.transport = transport;
        const auto body = [&](int32_t rank, const MoeLayer& layer) {
          for (const auto& counts : tokens) {
            const Tensor mine = tokens_of(rank, counts[static_cast<size_t>(rank)]);
            EXPECT_TRUE(same_bits(run_layer(layer, mine.view(), DType::kBF16).out, one.out(mine)));
          }
        };
        const auto outcomes =
            on_layers(row.make({.num_ranks = 3, .timeout = 20s}), spec, options, body);
        EXPECT_EQ(testing::first_failure(outcomes), "");
      }
    }
  }
}

// Tensor-parallel ranks add up in between; the same grid in turn has their bits.
TEST(OverlappedPipeline, EveryPartOfALayer_KeepsItsBits) {
  for (const auto& [name, spec] : testing::split_specs(23, DType::kBF16)) {
    SCOPED_TRACE(name);
    testing::on_grid(2, 2, [&, &layer_spec = spec](const testing::GridRank& rank) {
      const Context context(rank.context_options());
      const auto source = make_synthetic_source(layer_spec, 11);
      const ParallelSpec parallel =
          rank.in({.ep_size = 2, .num_redundant_experts = 1, .tp_size = 2});
      const Tensor mine =
          tokens_of(rank.ep_rank, rank.ep_rank == 0 ? 13 : 6, layer_spec.hidden_size);
      const auto run = [&](const LayerOptions& options) {
        const MoeLayer layer = MoeLayer::create(context, layer_spec, *source, options, parallel);
        return run_layer(layer, mine.view(), DType::kBF16).out;
      };
      EXPECT_TRUE(same_bits(run({.max_tokens = 20}), run(micro_batches(20, 2))));
    });
  }
}

// The order in which a rank begins, waits and computes. What test answers is the caller's to say.
class NotingRank final : public Communicator {
 public:
  explicit NotingRank(Communicator& real, bool has_come = false)
      : real_(real), has_come_(has_come) {}
  std::string_view name() const noexcept override { return real_.name(); }
  int32_t rank() const noexcept override { return real_.rank(); }
  int32_t size() const noexcept override { return real_.size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return real_.timeout(); }
  Support supports(CommFeature feature) const override { return real_.supports(feature); }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    notes.emplace_back(phase);
    real_.wait(handle, deadline, phase);
  }
  bool test(CommHandle, std::string_view) override { return has_come_; }
  void abort(std::string_view reason) noexcept override { real_.abort(reason); }

  std::vector<std::string> notes;

 protected:
  CommHandle start(const CommOperation& operation) override {
    notes.push_back(std::string(to_string(operation.kind)) +
                    (operation.in_background ? " in background" : ""));
    return real_.begin(operation);
  }

 private:
  Communicator& real_;
  bool has_come_;
};

class NotingExecutor final : public Executor {
 public:
  explicit NotingExecutor(NotingRank& rank) : rank_(rank) {}
  int32_t concurrency() const noexcept override { return 1; }
  void run(ParallelTask task) override {
    if (rank_.notes.empty() || rank_.notes.back() != "products")
      rank_.notes.emplace_back("products");
    task.invoke(task.state, 0);
  }

 private:
  NotingRank& rank_;
};

// What each of two ranks does in a forward of as many tokens.
std::vector<std::vector<std::string>> notes_of(const MoeSpec& spec, const LayerOptions& options,
                                               std::vector<int64_t> tokens, bool has_come) {
  const OneRank one(spec);
  std::vector<std::vector<std::string>> notes(2);
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = 2, .timeout = 20s}), [&](int32_t rank, Communicator& real) {
        NotingRank noting(real, has_come);
        NotingExecutor executor(noting);
        const Context context({.executor = &executor, .communicator = &noting});
        const auto source = make_synthetic_source(spec, 11);
        const MoeLayer layer =
            MoeLayer::create(context, spec, *source, options, {.ep_size = 2, .ep_rank = rank});
        const auto at = static_cast<size_t>(rank);
        const Tensor mine = tokens_of(rank, tokens[at]);
        const Tensor expected = one.out(mine);
        noting.notes.clear();
        EXPECT_TRUE(same_bits(run_layer(layer, mine.view(), DType::kBF16).out, expected));
        notes[at] = noting.notes;
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
  return notes;
}

TEST(OverlappedPipeline, EveryRank_MakesAsManyExchanges) {
  LayerOptions options = micro_batches(8, 5);
  options.transport = EpTransport::kFixedSlots;
  const auto exchanges = [&](std::vector<int64_t> tokens) {
    std::vector<int64_t> counts;
    for (const auto& notes : notes_of(shared_spec(), options, tokens, false)) {
      counts.push_back(std::ranges::count(notes, "all_to_all_v in background"));
    }
    EXPECT_EQ(counts[0], counts[1]);
    return counts[0];
  };
  EXPECT_EQ(exchanges({0, 0}), 0);
  EXPECT_EQ(exchanges({4, 4}), 2);
  EXPECT_EQ(exchanges({1, 5}), 4);  // one rank with enough tokens cuts those of all
  EXPECT_EQ(exchanges({0, 8}), 4);
  EXPECT_EQ(exchanges({9, 0}), 6);
}

TEST(OverlappedPipeline, OneMicroBatch_TravelsWhileTheOtherComputes) {
  MoeSpec spec = make_spec(7, 3, 40, 24, DType::kBF16);
  LayerOptions options = micro_batches(8, 2);
  options.transport = EpTransport::kFixedSlots;
  const std::string begin = "all_to_all_v in background";
  // The rows of both set out before the experts of either run.
  const std::vector<std::string> expected = {"all_reduce",
                                             "forward: agree on the chunks",
                                             begin,
                                             begin,
                                             "dispatch.slots",
                                             "products",
                                             begin,
                                             "dispatch.slots",
                                             "products",
                                             begin,
                                             "combine.rows",
                                             "combine.rows"};
  const auto notes = notes_of(spec, options, {8, 8}, false);
  EXPECT_EQ(notes[0], expected);
  EXPECT_EQ(notes[1], expected);
}

// The exchange behind which products come first, and whether they do.
std::string behind(const std::vector<std::string>& notes, int nth_exchange) {
  auto place = notes.begin();
  for (; nth_exchange > 0; --nth_exchange) {
    const auto exchanges = [](const std::string& note) { return note.starts_with("all_to_all_v"); };
    place = std::find_if(place, notes.end(), exchanges) + 1;
  }
  return *place;
}

// Results are heavier than rows where each choice has one; with one choice and slots of a fixed
// number rows are.
TEST(SharedExperts, InTurn_FillTheWaitForWhatIsHeavier) {
  const LayerOptions options{.max_tokens = 8, .transport = EpTransport::kFixedSlots};
  MoeSpec one_choice = shared_spec();
  one_choice.top_k = 1;
  for (const bool has_come : {false, true}) {
    for (const auto& notes : notes_of(shared_spec(), options, {8, 5}, has_come)) {
      EXPECT_EQ(behind(notes, 1), "dispatch.slots");
      EXPECT_EQ(behind(notes, 2), "products");
    }
    for (const auto& notes : notes_of(one_choice, options, {8, 5}, has_come)) {
      EXPECT_EQ(behind(notes, 1), has_come ? "dispatch.slots" : "products");
      EXPECT_EQ(behind(notes, 2), has_come ? "products" : "combine.rows");
    }
  }
}

// The first to wait for rows is one micro-batch, the last to wait for results the other.
TEST(SharedExperts, MicroBatches_FillTheFirstWaitAndTheLast) {
  LayerOptions options = micro_batches(8, 2);
  options.transport = EpTransport::kFixedSlots;
  for (const auto& notes : notes_of(shared_spec(), options, {8, 8}, false)) {
    EXPECT_EQ(behind(notes, 2), "products");
    EXPECT_EQ(behind(notes, 3), "dispatch.slots");
    EXPECT_EQ(behind(notes, 4), "products");
  }
  for (const auto& notes : notes_of(shared_spec(), options, {8, 8}, true)) {
    EXPECT_EQ(behind(notes, 2), "dispatch.slots");
    EXPECT_EQ(behind(notes, 3), "products");
    EXPECT_EQ(behind(notes, 4), "products");
  }
}

const PlanRow* row_of(const Plan& plan, const std::string& table) {
  const auto row = std::ranges::find(plan.rows, table, &PlanRow::table);
  return row == plan.rows.end() ? nullptr : &*row;
}

TEST(OverlappedPipeline, Plan_SaysFromWhichCallsOnItCuts) {
  const MoeSpec spec = make_spec(64, 4, 40, 24, DType::kBF16);
  const auto group = make_local_group({.num_ranks = 2});
  const Context context({.num_threads = 1, .communicator = group[0].get()});
  const Plan in_turn = make_plan(context, spec, {.max_tokens = 1024}, {.ep_size = 2});
  EXPECT_EQ(row_of(in_turn, "chunks"), nullptr);
  const auto plan_of = [&](int64_t from) {
    return make_plan(context, spec, micro_batches(1024, from), {.ep_size = 2});
  };
  const Plan by_rule = plan_of(0);
  ASSERT_NE(row_of(by_rule, "chunks"), nullptr);
  EXPECT_TRUE(row_of(by_rule, "chunks")->chosen);
  EXPECT_EQ(row_of(by_rule, "chunks")->name, "micro_batches");
  // 64 rows for each of 64 experts are 4096 choices, 4 a token and 2 ranks.
  EXPECT_NE(row_of(by_rule, "chunks")->reason.find("512 tokens"), std::string::npos)
      << row_of(by_rule, "chunks")->reason;
  EXPECT_NE(row_of(plan_of(100), "chunks")->reason.find("100 tokens"), std::string::npos);
  EXPECT_LT(plan_of(100).workspace_bytes, in_turn.workspace_bytes * 5 / 4);
  EXPECT_LE(plan_of(1024).workspace_bytes, in_turn.workspace_bytes * 2);

  const Context alone({.num_threads = 1});
  const Plan on_one_rank = make_plan(alone, spec, micro_batches(1024, 0));
  EXPECT_FALSE(row_of(on_one_rank, "chunks")->chosen);
  EXPECT_EQ(on_one_rank.workspace_bytes,
            make_plan(alone, spec, {.max_tokens = 1024}).workspace_bytes);
}

TEST(OverlappedPipeline, TokensThatNothingReads_AreRefused) {
  const MoeSpec spec = make_spec(6, 2, 32, 16, DType::kBF16);
  const Context context({.num_threads = 1});
  for (const LayerOptions& options :
       {LayerOptions{.micro_batch_tokens = 4},
        LayerOptions{.chunk_order = ChunkOrder::kByTwos, .micro_batch_tokens = 4},
        LayerOptions{.chunk_order = ChunkOrder::kMicroBatches, .micro_batch_tokens = -1}}) {
    try {
      make_plan(context, spec, options);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_NE(std::string(error.what()).find("micro_batch_tokens"), std::string::npos);
    }
  }
}

// A rank that throws in one of its waits or products, after both micro-batches have set out.
class FailingRank final : public Communicator {
 public:
  FailingRank(Communicator& real, std::string_view at, int32_t nth)
      : real_(real), at_(at), left_(nth) {}
  std::string_view name() const noexcept override { return real_.name(); }
  int32_t rank() const noexcept override { return real_.rank(); }
  int32_t size() const noexcept override { return real_.size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return real_.timeout(); }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    if (phase == at_ && left_-- == 0) throw std::runtime_error("planted");
    real_.wait(handle, deadline, phase);
  }
  bool test(CommHandle handle, std::string_view phase) override {
    return real_.test(handle, phase);
  }
  void check(std::string_view phase) override { real_.check(phase); }
  void abort(std::string_view reason) noexcept override { real_.abort(reason); }

 protected:
  CommHandle start(const CommOperation& operation) override { return real_.begin(operation); }

 private:
  Communicator& real_;
  std::string at_;
  int32_t left_;
};

TEST(OverlappedPipeline, RankThatFailsOrDies_EndsEveryOtherInEveryPhase) {
  const MoeSpec spec = shared_spec();
  for (const testing::ThreadGroups& row : testing::kThreadGroups) {
    for (const char* phase : {"dispatch.counts", "dispatch.ids", "dispatch.rows", "combine.rows"}) {
      for (const int32_t nth : {0, 1}) {
        SCOPED_TRACE(std::string(row.name) + ", " + phase + " " + std::to_string(nth));
        const auto outcomes = testing::run_ranks(
            row.make({.num_ranks = 3, .timeout = 20s}), [&](int32_t rank, Communicator& real) {
              FailingRank failing(real, rank == 1 ? phase : "", nth);
              const Context context({.num_threads = 1, .communicator = &failing});
              const auto source = make_synthetic_source(spec, 11);
              const MoeLayer layer = MoeLayer::create(context, spec, *source, micro_batches(64, 2),
                                                      {.ep_size = 3, .ep_rank = rank});
              const Tensor mine = tokens_of(rank, 64);
              for (int call = 0; call < 2; ++call) run_layer(layer, mine.view(), DType::kBF16);
            });
        ASSERT_TRUE(outcomes[1].code);
        EXPECT_NE(outcomes[1].message.find("planted"), std::string::npos) << outcomes[1].message;
        for (const size_t rank : {0U, 2U}) {
          ASSERT_TRUE(outcomes[rank].code);
          EXPECT_EQ(*outcomes[rank].code, ErrorCode::kCommAborted) << outcomes[rank].message;
          EXPECT_EQ(outcomes[rank].peer, 1);
        }
      }
    }
  }
}

TEST(OverlappedPipeline, RankThatNeverComes_IsNamedAtTheDeadline) {
  const MoeSpec spec = shared_spec();
  for (const testing::ThreadGroups& row : testing::kThreadGroups) {
    SCOPED_TRACE(std::string(row.name));
    const auto begin = std::chrono::steady_clock::now();
    const auto outcomes = on_layers(row.make({.num_ranks = 3, .timeout = 1s}), spec,
                                    micro_batches(64, 2), [&](int32_t rank, const MoeLayer& layer) {
                                      if (rank == 2) std::this_thread::sleep_for(2s);
                                      const Tensor mine = tokens_of(rank, 64);
                                      run_layer(layer, mine.view(), DType::kBF16);
                                    });
    for (const size_t rank : {0U, 1U}) {
      ASSERT_TRUE(outcomes[rank].code);
      EXPECT_EQ(*outcomes[rank].code, ErrorCode::kCommTimeout) << outcomes[rank].message;
      EXPECT_EQ(outcomes[rank].peer, 2);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 12s);
  }
}

}  // namespace
}  // namespace conclave
