// D3: the layer over 1, 2, 4 and 8 thread ranks gives the bits of one rank.

#include "support/layer_fixture.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::gather_rows;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

// Runs `body(rank, communicator)` on one thread per rank; rethrows the first exception.
template <class Body>
void on_ranks(int32_t ranks, const Body& body) {
  auto group = make_local_group({.num_ranks = ranks, .timeout = std::chrono::seconds(60)});
  std::vector<std::exception_ptr> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      auto& communicator = group[static_cast<size_t>(rank)];
      try {
        body(rank, *communicator);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
        communicator->abort("rank failed");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Rank r's tokens of a [T, H] batch; the split is uneven, and some ranks may get none.
std::vector<int64_t> rows_of_rank(int64_t tokens, int32_t ranks, int32_t rank, bool one_rank_only) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < tokens; ++row) {
    const int32_t owner = one_rank_only ? ranks - 1 : static_cast<int32_t>(row * row % ranks);
    if (owner == rank) rows.push_back(row);
  }
  return rows;
}

struct EpCase {
  int32_t ranks;
  PlacementStrategy placement;
  EpTransport transport;
  int64_t experts;
  bool one_rank_only;
};

std::string name_of(const ::testing::TestParamInfo<EpCase>& info) {
  const EpCase& c = info.param;
  return "R" + std::to_string(c.ranks) + "E" + std::to_string(c.experts) +
         (c.placement == PlacementStrategy::kLinear ? "Linear" : "RoundRobin") +
         (c.transport == EpTransport::kVariable ? "Variable" : "Fixed") +
         (c.one_rank_only ? "OneRank" : "Spread");
}

std::vector<EpCase> all_cases() {
  std::vector<EpCase> cases;
  for (const int32_t ranks : {1, 2, 4, 8}) {
    for (const auto placement : {PlacementStrategy::kLinear, PlacementStrategy::kRoundRobin}) {
      for (const auto transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
        // 7 experts do not divide by 2 or 4; with 3, some of 4 and 8 ranks have no experts.
        for (const int64_t experts : {8, 7, 3}) {
          for (const bool one_rank_only : {false, true}) {
            cases.push_back({ranks, placement, transport, experts, one_rank_only});
          }
        }
      }
    }
  }
  return cases;
}

class ExpertParallel : public ::testing::TestWithParam<EpCase> {};

TEST_P(ExpertParallel, AnySplit_GivesTheBitsOfOneRank) {
  const EpCase& c = GetParam();
  MoeSpec spec = make_spec(c.experts, 3, 40, 24, DType::kBF16);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 16};
  const int64_t tokens = 45;
  const Tensor hidden = random_tensor(DType::kBF16, tokens, 40, 1);
  const OwnedLayer one = make_layer(spec);
  const auto expected = run_layer(one.layer, hidden.view(), DType::kBF16);
  on_ranks(c.ranks, [&](int32_t rank, Communicator& communicator) {
    const Context context({.num_threads = 1, .communicator = &communicator});
    const auto source = make_synthetic_source(spec, 11);
    const MoeLayer layer =
        MoeLayer::create(context, spec, *source, {.max_tokens = 8, .transport = c.transport},
                         {.ep_size = c.ranks, .ep_rank = rank, .placement = c.placement});
    const std::vector<int64_t> rows = rows_of_rank(tokens, c.ranks, rank, c.one_rank_only);
    const Tensor mine = gather_rows(hidden, rows);
    for (int repeat = 0; repeat < 3; ++repeat) {
      const auto output = run_layer(layer, mine.view(), DType::kBF16);
      EXPECT_TRUE(same_bits(output.out, gather_rows(expected.out, rows))) << "rank " << rank;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Splits, ExpertParallel, ::testing::ValuesIn(all_cases()), name_of);

// Weighted rows travel, one per choice: with either transport, with replicas, and chunked.
TEST(ExpertParallelWeightOnInput, SeveralChoices_HaveTheBitsOfOneRank) {
  MoeSpec spec = make_spec(7, 3, 40, 24, DType::kBF16);
  spec.weight_on = WeightOn::kInput;
  spec.has_bias = true;
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 16};
  const int64_t tokens = 45;
  const Tensor hidden = random_tensor(DType::kBF16, tokens, 40, 1);
  const OwnedLayer one = make_layer(spec);
  const auto expected = run_layer(one.layer, hidden.view(), DType::kBF16);
  for (const EpTransport transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    for (const EpCombine combine : {EpCombine::kUnreduced, EpCombine::kReducedPerRank}) {
      on_ranks(3, [&](int32_t rank, Communicator& communicator) {
        const Context context({.num_threads = 1, .communicator = &communicator});
        const auto source = make_synthetic_source(spec, 11);
        const MoeLayer layer =
            MoeLayer::create(context, spec, *source,
                             {.max_tokens = 8, .transport = transport, .ep_combine = combine},
                             {.ep_size = 3, .ep_rank = rank, .num_redundant_experts = 4});
        const std::vector<int64_t> rows = rows_of_rank(tokens, 3, rank, false);
        const Tensor mine = gather_rows(hidden, rows);
        const auto output = run_layer(layer, mine.view(), DType::kBF16);
        // A rank's sum for a row is that row, since it contains one choice.
        EXPECT_TRUE(same_bits(output.out, gather_rows(expected.out, rows))) << "rank " << rank;
      });
    }
  }
}

// The other combine sums per rank first: it is accurate, but its bits may differ. That they do is
// the negative control for the comparison above.
TEST(ExpertParallelReduced, PerRankSums_AreAccurateButNotD3) {
  const MoeSpec spec = make_spec(8, 4, 96, 48, DType::kF32);
  const int64_t tokens = 64;
  const Tensor hidden = random_tensor(DType::kF32, tokens, 96, 1);
  const OwnedLayer one = make_layer(spec);
  const auto expected = run_layer(one.layer, hidden.view(), DType::kF32);
  const ReferenceResult reference =
      reference_forward(*one.context, spec, *one.source, {.hidden = hidden.view()});
  for (const EpTransport transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
    std::vector<int> differs(4);
    std::vector<double> errors(4);
    on_ranks(4, [&](int32_t rank, Communicator& communicator) {
      const Context context({.num_threads = 1, .communicator = &communicator});
      const auto source = make_synthetic_source(spec, 11);
      const MoeLayer layer = MoeLayer::create(
          context, spec, *source,
          {.max_tokens = 64, .transport = transport, .ep_combine = EpCombine::kReducedPerRank},
          {.ep_size = 4, .ep_rank = rank});
      const auto output = run_layer(layer, hidden.view(), DType::kF32);
      differs[static_cast<size_t>(rank)] = !same_bits(output.out, expected.out);
      errors[static_cast<size_t>(rank)] = worst(token_errors(output.out.view(), reference.output));
    });
    for (size_t rank = 0; rank < 4; ++rank) {
      EXPECT_TRUE(differs[rank]);
      EXPECT_LE(errors[rank], accuracy_bar(DType::kF32, DType::kF32));
    }
  }
}

TEST(ExpertParallelErrors, RanksThatDisagree_AllGetAMismatch) {
  std::vector<ErrorCode> codes(3);
  auto group = make_local_group({.num_ranks = 3, .timeout = std::chrono::seconds(20)});
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
      const Context context(
          {.num_threads = 1, .communicator = group[static_cast<size_t>(rank)].get()});
      const auto source = make_synthetic_source(spec, 1);
      codes[static_cast<size_t>(rank)] = testing::code_of([&] {
        MoeLayer::create(context, spec, *source, {.max_tokens = rank == 1 ? 16 : 8},
                         {.ep_size = 3, .ep_rank = rank});
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(codes, std::vector<ErrorCode>(3, ErrorCode::kCommMismatch));
}

TEST(ExpertParallelErrors, MissingRank_IsATimeoutInBoundedTime) {
  auto group = make_local_group({.num_ranks = 2, .timeout = std::chrono::milliseconds(200)});
  const MoeSpec spec = make_spec(6, 2, 40, 24, DType::kBF16);
  const Context context({.num_threads = 1, .communicator = group[0].get()});
  const auto source = make_synthetic_source(spec, 1);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(testing::code_of([&] {
              MoeLayer::create(context, spec, *source, {}, {.ep_size = 2, .ep_rank = 0});
            }),
            ErrorCode::kCommTimeout);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

}  // namespace
}  // namespace conclave
