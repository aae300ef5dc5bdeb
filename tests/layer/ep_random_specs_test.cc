// D3 for layers with any parts: over several ranks, each token has the bits of one rank.

#include "support/layer_parts.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::gather_rows;
using testing::make_layer;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;
using testing::SpecDraw;

constexpr int32_t kRanks = 3;
constexpr int64_t kTokens = 26;

// Rank 1 has no tokens, rank 2 has most.
std::vector<int64_t> rows_of_rank(int32_t rank) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < kTokens; ++row) {
    const int32_t owner = row % 4 == 0 ? 0 : 2;
    if (owner == rank) rows.push_back(row);
  }
  return rows;
}

class EpRandomSpec : public ::testing::TestWithParam<uint32_t> {};

TEST_P(EpRandomSpec, AnyParts_HaveTheBitsOfOneRank) {
  SpecDraw draw(GetParam());
  const MoeSpec spec = draw.draw();
  SCOPED_TRACE(testing::parts_text(spec));
  const LayerOptions options{
      .max_tokens = 8,
      .transport = draw.chance(2) ? EpTransport::kVariable : EpTransport::kFixedSlots};
  const bool own_residual = spec.residual.intermediate_size != 0 && draw.chance(2);
  const Tensor hidden = random_tensor(spec.weight_dtype, kTokens, spec.hidden_size, GetParam());
  const Tensor residual = random_tensor(DType::kF32, kTokens, spec.hidden_size, 5);
  const auto run = [&](const MoeLayer& layer, const std::vector<int64_t>& rows) {
    const Tensor mine = gather_rows(hidden, rows);
    const Tensor my_residual = gather_rows(residual, rows);
    ForwardArgs args;
    if (own_residual) args.residual_input = my_residual.const_view();
    return run_layer(layer, mine.const_view(), DType::kF32, args).out;
  };
  std::vector<int64_t> all(kTokens);
  for (int64_t row = 0; row < kTokens; ++row) all[static_cast<size_t>(row)] = row;
  const OwnedLayer one = make_layer(spec, options);
  const Tensor expected = run(one.layer, all);
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = kRanks, .timeout = std::chrono::seconds(60)}),
      [&](int32_t rank, Communicator& communicator) {
        const Context context({.num_threads = 1, .communicator = &communicator});
        const auto source = make_synthetic_source(spec, 11);
        const MoeLayer layer =
            MoeLayer::create(context, spec, *source, options, {.ep_size = kRanks, .ep_rank = rank});
        const std::vector<int64_t> rows = rows_of_rank(rank);
        EXPECT_TRUE(same_bits(run(layer, rows), gather_rows(expected, rows))) << "rank " << rank;
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

INSTANTIATE_TEST_SUITE_P(Draws, EpRandomSpec, ::testing::Range(300U, 330U));

}  // namespace
}  // namespace conclave
