// Chunks of a call by twos: the bits of chunks in turn, and an exchange under way while the other
// chunk computes.
#include "layer/split_specs.h"
#include "support/rank_grid.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::GridRank;
using testing::LayerOutput;
using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

struct CallResult {
  LayerOutput output;
  std::vector<int64_t> load;
  LayerStatus status;
};

CallResult run(const GridRank& rank, const MoeSpec& spec, LayerOptions options,
               const ParallelSpec& parallel, ChunkOrder order, int64_t tokens) {
  options.chunk_order = order;
  const Context context(rank.context_options());
  const auto source = make_synthetic_source(spec, 11);
  const MoeLayer layer = MoeLayer::create(context, spec, *source, options, rank.in(parallel));
  const Tensor hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size,
                                      3 + static_cast<uint64_t>(rank.ep_rank));
  CallResult result;
  result.load.assign(static_cast<size_t>(spec.num_experts), 0);
  result.output = run_layer(layer, hidden.view(), DType::kBF16, {.expert_load = result.load});
  result.status = layer.status();
  return result;
}

void expect_equal(const CallResult& a, const CallResult& b) {
  EXPECT_TRUE(same_bits(a.output.out, b.output.out));
  EXPECT_TRUE(same_bits(a.output.ids, b.output.ids));
  EXPECT_TRUE(same_bits(a.output.weights, b.output.weights));
  EXPECT_EQ(a.load, b.load);
  EXPECT_EQ(a.status.tokens, b.status.tokens);
  EXPECT_EQ(a.status.skipped_ids, b.status.skipped_ids);
}

// No tokens, one, an even and an odd number of chunks; ranks with fewer tokens than their peers
// take part with empty chunks.
TEST(ChunkOrder, ByTwos_HasTheBitsOfInTurn) {
  const MoeSpec spec = [] {
    MoeSpec s = make_spec(7, 3, 40, 24, DType::kBF16);
    s.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 16};
    return s;
  }();
  const std::vector<std::vector<int64_t>> tokens = {{0, 0, 0}, {1, 0, 0}, {4, 9, 1}, {21, 3, 0}};
  for (const int32_t ranks : {1, 2, 3}) {
    for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
      for (const auto combine : {EpCombine::kUnreduced, EpCombine::kReducedPerRank}) {
        for (const auto& counts : tokens) {
          testing::on_grid(ranks, 1, [&](const GridRank& rank) {
            const LayerOptions options{
                .max_tokens = 4, .transport = transport, .ep_combine = combine};
            const ParallelSpec parallel{.ep_size = ranks};
            const int64_t mine = counts[static_cast<size_t>(rank.ep_rank)];
            const CallResult in_turn =
                run(rank, spec, options, parallel, ChunkOrder::kInTurn, mine);
            const CallResult by_twos =
                run(rank, spec, options, parallel, ChunkOrder::kByTwos, mine);
            expect_equal(in_turn, by_twos);
          });
        }
      }
    }
  }
}

// Every part of a layer, with tensor-parallel ranks that add up in between.
TEST(ChunkOrder, EveryPartOfALayer_KeepsItsBits) {
  for (const auto& [name, spec] : testing::split_specs(23, DType::kBF16)) {
    SCOPED_TRACE(name);
    testing::on_grid(2, 2, [&, &layer_spec = spec](const GridRank& rank) {
      const LayerOptions options{.max_tokens = 3};
      const ParallelSpec parallel{.ep_size = 2, .num_redundant_experts = 1, .tp_size = 2};
      const int64_t tokens = rank.ep_rank == 0 ? 13 : 6;
      expect_equal(run(rank, layer_spec, options, parallel, ChunkOrder::kInTurn, tokens),
                   run(rank, layer_spec, options, parallel, ChunkOrder::kByTwos, tokens));
    });
  }
}

TEST(ChunkOrder, OutputInPlace_IsTheSame) {
  const MoeSpec spec = make_spec(6, 2, 32, 16, DType::kBF16);
  testing::on_grid(2, 1, [&](const GridRank& rank) {
    const Context context(rank.context_options());
    const auto source = make_synthetic_source(spec, 11);
    const MoeLayer layer = MoeLayer::create(context, spec, *source,
                                            {.max_tokens = 3, .chunk_order = ChunkOrder::kByTwos},
                                            rank.in({.ep_size = 2}));
    Tensor hidden = random_tensor(DType::kBF16, 11, 32, 3);
    const auto expected = run_layer(layer, hidden.view(), DType::kBF16);
    layer.forward({.hidden = hidden.view(), .out = hidden.view()});
    EXPECT_TRUE(same_bits(hidden, expected.out));
  });
}

TEST(ChunkOrder, Plan_SaysWhetherItIsTaken) {
  const MoeSpec spec = make_spec(6, 2, 32, 16, DType::kBF16);
  const auto row_of = [](const Plan& plan) {
    const auto row = std::find_if(plan.rows.begin(), plan.rows.end(),
                                  [](const PlanRow& r) { return r.table == "chunks"; });
    return row == plan.rows.end() ? PlanRow{} : *row;
  };
  const LayerOptions by_twos{.max_tokens = 8, .chunk_order = ChunkOrder::kByTwos};
  const Context alone({.num_threads = 1});
  EXPECT_EQ(row_of(make_plan(alone, spec, {.max_tokens = 8})).name, "");
  const Plan on_one_rank = make_plan(alone, spec, by_twos);
  EXPECT_FALSE(row_of(on_one_rank).chosen);
  EXPECT_NE(row_of(on_one_rank).reason.find("no rows travel"), std::string::npos);
  EXPECT_EQ(on_one_rank.workspace_bytes, make_plan(alone, spec, {.max_tokens = 8}).workspace_bytes);

  const auto group = make_local_group({.num_ranks = 2});
  const Context context({.num_threads = 1, .communicator = group[0].get()});
  const Plan in_turn = make_plan(context, spec, {.max_tokens = 8}, {.ep_size = 2});
  const Plan interleaved = make_plan(context, spec, by_twos, {.ep_size = 2});
  EXPECT_TRUE(row_of(interleaved).chosen);
  EXPECT_NE(row_of(interleaved).reason.find("experts of the other run"), std::string::npos);
  EXPECT_EQ(interleaved.workspace_bytes, 2 * in_turn.workspace_bytes);
}

// Forwards to a rank's real communicator and notes what began, and what was waited for.
class NotingCommunicator final : public Communicator {
 public:
  explicit NotingCommunicator(Communicator& real) : real_(real) {}
  std::string_view name() const noexcept override { return real_.name(); }
  int32_t rank() const noexcept override { return real_.rank(); }
  int32_t size() const noexcept override { return real_.size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return real_.timeout(); }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    notes.emplace_back(phase);
    real_.wait(handle, deadline, phase);
  }
  bool test(CommHandle handle, std::string_view phase) override {
    return real_.test(handle, phase);
  }
  void abort(std::string_view reason) noexcept override { real_.abort(reason); }

  std::vector<std::string> notes;

 protected:
  CommHandle start(const CommOperation& operation) override {
    notes.emplace_back(to_string(operation.kind));
    return real_.begin(operation);
  }

 private:
  Communicator& real_;
};

TEST(ChunkOrder, ByTwos_RowsOfOneTravelWhileTheOtherComputes) {
  const MoeSpec spec = make_spec(6, 2, 32, 16, DType::kBF16);
  const auto notes_of = [&](ChunkOrder order) {
    std::vector<std::vector<std::string>> notes(2);
    const auto outcomes = testing::run_ranks(
        make_local_group({.num_ranks = 2, .timeout = 20s}), [&](int32_t rank, Communicator& real) {
          NotingCommunicator communicator(real);
          const Context context({.num_threads = 1, .communicator = &communicator});
          const auto source = make_synthetic_source(spec, 11);
          const MoeLayer layer = MoeLayer::create(
              context, spec, *source,
              {.max_tokens = 4, .transport = EpTransport::kFixedSlots, .chunk_order = order},
              {.ep_size = 2, .ep_rank = rank});
          communicator.notes.clear();
          const Tensor hidden = random_tensor(DType::kBF16, 12, 32, 3);
          run_layer(layer, hidden.view(), DType::kBF16);
          notes[static_cast<size_t>(rank)] = communicator.notes;
        });
    EXPECT_EQ(testing::first_failure(outcomes), "");
    EXPECT_EQ(notes[0], notes[1]);
    return notes[0];
  };
  const std::string begin = "all_to_all_v";
  const std::string rows = "dispatch.slots";
  const std::string results = "combine.rows";
  std::vector<std::string> in_turn = {"all_reduce", "forward: agree on the chunks"};
  std::vector<std::string> by_twos = in_turn;
  for (int chunk = 0; chunk < 3; ++chunk) {
    in_turn.insert(in_turn.end(), {begin, rows, begin, results});
  }
  // Chunks 0 and 1 set out; 0 runs, 1 runs; 0 ends and 2 sets out, 1 ends; 2 runs and ends.
  by_twos.insert(by_twos.end(), {begin, begin, rows, begin, rows, begin, results, begin, results,
                                 rows, begin, results});
  EXPECT_EQ(notes_of(ChunkOrder::kInTurn), in_turn);
  EXPECT_EQ(notes_of(ChunkOrder::kByTwos), by_twos);
}

class ThrowingRouter final : public Router {
 public:
  explicit ThrowingRouter(int64_t good_calls) : good_calls_(good_calls) {}
  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor&) const override {
    if (good_calls_-- == 0) throw Error(ErrorCode::kInvalidArgument, "the router has had enough");
    for (int64_t at = 0; at < input.num_tokens * 2; ++at) {
      output.topk_ids[at] = static_cast<int32_t>(at % 6);
      output.topk_weights[at] = 0.5F;
    }
    return {};
  }

 private:
  mutable int64_t good_calls_;
};

// The workspace is freed with the layer, while peers are still in their calls.
TEST(ChunkOrder, ErrorWhileRowsTravel_EndsTheExchangeAndTellsThePeers) {
  MoeSpec spec = make_spec(6, 2, 32, 16, DType::kBF16);
  spec.router.name = "throwing";
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    for (const ChunkOrder order : {ChunkOrder::kInTurn, ChunkOrder::kByTwos}) {
      const auto outcomes =
          testing::run_ranks(make_local_group({.num_ranks = 3, .timeout = 20s}),
                             [&](int32_t rank, Communicator& communicator) {
                               Context context({.num_threads = 1, .communicator = &communicator});
                               context.add_router("throwing", [rank](const MoeSpec&) {
                                 return std::make_unique<ThrowingRouter>(rank == 1 ? 1 : 100);
                               });
                               const auto source = make_synthetic_source(spec, 11);
                               const MoeLayer layer = MoeLayer::create(
                                   context, spec, *source,
                                   {.max_tokens = 4, .transport = transport, .chunk_order = order},
                                   {.ep_size = 3, .ep_rank = rank});
                               const Tensor hidden = random_tensor(DType::kBF16, 12, 32, 3);
                               run_layer(layer, hidden.view(), DType::kBF16);
                             });
      ASSERT_TRUE(outcomes[1].code);
      EXPECT_EQ(*outcomes[1].code, ErrorCode::kInvalidArgument) << outcomes[1].message;
      for (const size_t rank : {0U, 2U}) {
        ASSERT_TRUE(outcomes[rank].code);
        EXPECT_EQ(*outcomes[rank].code, ErrorCode::kCommAborted) << outcomes[rank].message;
        EXPECT_EQ(outcomes[rank].peer, 1);
        EXPECT_NE(outcomes[rank].message.find("had enough"), std::string::npos);
      }
    }
  }
}

TEST(ChunkOrder, RankThatIsLostBetweenTwoChunks_EndsEveryOther) {
  const MoeSpec spec = make_spec(6, 2, 32, 16, DType::kBF16);
  for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    const auto outcomes = testing::run_ranks(
        make_local_group({.num_ranks = 3, .timeout = 20s}), [&](int32_t rank, Communicator& comm) {
          const Context context({.num_threads = 1, .communicator = &comm});
          const auto source = make_synthetic_source(spec, 11);
          const MoeLayer layer = MoeLayer::create(
              context, spec, *source,
              {.max_tokens = 4, .transport = transport, .chunk_order = ChunkOrder::kByTwos},
              {.ep_size = 3, .ep_rank = rank});
          if (rank == 1) return;  // its communicator goes with it
          const Tensor hidden = random_tensor(DType::kBF16, 12, 32, 3);
          run_layer(layer, hidden.view(), DType::kBF16);
        });
    for (const size_t rank : {0U, 2U}) {
      ASSERT_TRUE(outcomes[rank].code);
      EXPECT_EQ(*outcomes[rank].code, ErrorCode::kCommPeerLost) << outcomes[rank].message;
      EXPECT_EQ(outcomes[rank].peer, 1);
    }
  }
}

}  // namespace
}  // namespace conclave
