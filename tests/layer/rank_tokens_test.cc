// Numbers of tokens of all ranks that a call has: no bit changes, and lists that differ are told to
// every rank. Over every transport of the CPU.
#include "support/layer_fixture.h"
#include "support/rank_groups.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_spec;
using testing::on_every_group;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

constexpr int64_t kHidden = 16;

MoeSpec small_spec() { return make_spec(5, 2, kHidden, 12, DType::kF32); }

// Rank r brings 3 r tokens: the first one none, others more than one chunk.
std::vector<int64_t> tokens_of(int32_t ranks) {
  std::vector<int64_t> tokens;
  for (int32_t rank = 0; rank < ranks; ++rank) tokens.push_back(3 * rank);
  return tokens;
}

MoeLayer layer_of(const Context& context, Communicator& communicator) {
  const auto source = make_synthetic_source(small_spec(), 11);
  return MoeLayer::create(context, small_spec(), *source, {.max_tokens = 4},
                          {.ep_size = communicator.size(), .ep_rank = communicator.rank()});
}

Tensor rows_of(int32_t rank) {
  return random_tensor(DType::kF32, 3 * rank, kHidden, static_cast<uint64_t>(rank));
}

// A call with this list ends with this text, or with none where it comes through.
std::string message_of(const MoeLayer& layer, const Tensor& hidden,
                       const std::vector<int64_t>& tokens, ErrorCode expected) {
  try {
    run_layer(layer, hidden.view(), DType::kF32, {.rank_tokens = tokens});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), expected) << error.what();
    return error.what();
  }
  return {};
}

TEST(RankTokens, TheListOfAllRanks_ChangesNoBit) {
  on_every_group([](int32_t rank, Communicator& communicator) {
    const Context context({.num_threads = 1, .communicator = &communicator});
    const MoeLayer layer = layer_of(context, communicator);
    const Tensor hidden = rows_of(rank);
    const std::vector<int64_t> tokens = tokens_of(communicator.size());
    const auto asked = run_layer(layer, hidden.view(), DType::kF32);
    const auto told = run_layer(layer, hidden.view(), DType::kF32, {.rank_tokens = tokens});
    EXPECT_TRUE(same_bits(told.out, asked.out)) << "rank " << rank;
  });
}

// The list of rank 0 is right for itself and wrong for the last rank: only together they show it.
TEST(RankTokens, ListsThatDiffer_AreAMismatchOnEveryRank) {
  on_every_group([](int32_t rank, Communicator& communicator) {
    if (communicator.size() == 1) return;
    const Context context({.num_threads = 1, .communicator = &communicator});
    const MoeLayer layer = layer_of(context, communicator);
    const Tensor hidden = rows_of(rank);
    const std::vector<int64_t> tokens = tokens_of(communicator.size());
    std::vector<int64_t> other = tokens;
    if (rank == 0) other.back() += 1;
    EXPECT_NE(message_of(layer, hidden, other, ErrorCode::kCommMismatch).find("rank_tokens"),
              std::string::npos);
    if (rank == 0) other.clear();
    EXPECT_NE(message_of(layer, hidden, other, ErrorCode::kCommMismatch).find("others none"),
              std::string::npos);
    // Nothing was under way, so that the ranks go on.
    EXPECT_EQ(message_of(layer, hidden, tokens, ErrorCode{0}), "");
  });
}

TEST(RankTokens, AListThatCannotBe_IsRefusedBeforeAnythingIsSent) {
  on_every_group([](int32_t rank, Communicator& communicator) {
    const Context context({.num_threads = 1, .communicator = &communicator});
    const MoeLayer layer = layer_of(context, communicator);
    const Tensor hidden = rows_of(rank);
    const std::vector<int64_t> tokens = tokens_of(communicator.size());
    const auto refused = [&](std::vector<int64_t> given, size_t at, int64_t value) {
      if (at == given.size()) given.push_back(0);
      given[at] = value;
      return code_of([&] { run_layer(layer, hidden.view(), DType::kF32, {.rank_tokens = given}); });
    };
    const auto own = static_cast<size_t>(rank);
    EXPECT_EQ(refused(tokens, tokens.size(), 0), ErrorCode::kShape);
    EXPECT_EQ(refused(tokens, 0, -1), ErrorCode::kInvalidArgument);
    EXPECT_EQ(refused(tokens, 0, int64_t{1} << 40), ErrorCode::kInvalidArgument);
    EXPECT_EQ(refused(tokens, own, 3 * rank + 1), ErrorCode::kInvalidArgument);
    EXPECT_EQ(message_of(layer, hidden, tokens, ErrorCode{0}), "");
  });
}

}  // namespace
}  // namespace conclave
