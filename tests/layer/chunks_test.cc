// Calls with more tokens than planned are cut into the fewest chunks, of equal size.

#include "layer/chunks.h"

#include "support/layer_fixture.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::make_layer;
using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;

std::vector<int64_t> counts_of(int64_t tokens, int64_t max_tokens) {
  std::vector<int64_t> counts;
  const int64_t chunks = num_chunks(tokens, max_tokens);
  for (int64_t index = 0; index < chunks; ++index) {
    counts.push_back(chunk_at(tokens, chunks, index).count);
  }
  return counts;
}

TEST(Chunks, KnownCalls_AreCutIntoEqualParts) {
  using Counts = std::vector<int64_t>;
  EXPECT_EQ(counts_of(5000, 4096), (Counts{2500, 2500}));
  EXPECT_EQ(counts_of(4097, 4096), (Counts{2049, 2048}));
  EXPECT_EQ(counts_of(4096, 4096), Counts{4096});
  EXPECT_EQ(counts_of(11, 4), (Counts{4, 4, 3}));
  EXPECT_EQ(counts_of(9, 4), (Counts{3, 3, 3}));
  EXPECT_EQ(counts_of(3, 1), (Counts{1, 1, 1}));
  EXPECT_EQ(counts_of(0, 4), Counts{});
}

TEST(Chunks, EveryCall_IsCoveredInOrderByTheFewestChunksOfOneSize) {
  for (int64_t tokens = 1; tokens <= 70; ++tokens) {
    for (int64_t max_tokens = 1; max_tokens <= 20; ++max_tokens) {
      const int64_t chunks = num_chunks(tokens, max_tokens);
      EXPECT_EQ(chunks, (tokens + max_tokens - 1) / max_tokens);
      int64_t next = 0;
      int64_t smallest = tokens;
      int64_t largest = 0;
      for (int64_t index = 0; index < chunks; ++index) {
        const TokenChunk chunk = chunk_at(tokens, chunks, index);
        EXPECT_EQ(chunk.begin, next);
        next += chunk.count;
        smallest = std::min(smallest, chunk.count);
        largest = std::max(largest, chunk.count);
      }
      EXPECT_EQ(next, tokens);
      EXPECT_LE(largest, max_tokens);
      EXPECT_LE(largest - smallest, 1) << tokens << " tokens, at most " << max_tokens;
    }
  }
}

TEST(Chunks, FewerTokensThanChunks_LeaveTheLastOnesEmpty) {
  std::vector<int64_t> counts;
  for (int64_t index = 0; index < 4; ++index) counts.push_back(chunk_at(2, 4, index).count);
  EXPECT_EQ(counts, (std::vector<int64_t>{1, 1, 0, 0}));
}

using Parts = std::vector<std::pair<int64_t, int64_t>>;  // first token and number of each call

// Chooses by a token's number in the call, and records the rows of each call.
class NotingRouter final : public Router {
 public:
  NotingRouter(Parts& parts, const MoeSpec& spec) : parts_(parts), spec_(spec) {}
  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor&) const override {
    parts_.emplace_back(input.first_token, input.num_tokens);
    for (int64_t token = 0; token < input.num_tokens; ++token) {
      for (int64_t slot = 0; slot < spec_.top_k; ++slot) {
        const int64_t at = token * spec_.top_k + slot;
        output.topk_ids[at] =
            static_cast<int32_t>((input.first_token + token + slot) % spec_.num_experts);
        output.topk_weights[at] = 0.3F + 0.2F * static_cast<float>(slot);
      }
    }
    return {};
  }

 private:
  Parts& parts_;
  MoeSpec spec_;
};

MoeSpec noted_spec() {
  MoeSpec spec = make_spec(5, 2, 24, 16, DType::kF32);
  spec.router.name = "noting";
  return spec;
}

void add_noting_router(Context& context, Parts& parts) {
  context.add_router("noting", [&parts](const MoeSpec& spec) {
    return std::make_unique<NotingRouter>(parts, spec);
  });
}

TEST(ChunkedForward, CallAboveThePlan_RunsInEqualChunksWithTheSameBits) {
  const MoeSpec spec = noted_spec();
  const Tensor hidden = random_tensor(DType::kF32, 23, 24, 3);
  const auto source = make_synthetic_source(spec, 7);
  Parts parts;
  Context context({.num_threads = 2});
  add_noting_router(context, parts);
  const auto run = [&](int64_t max_tokens) {
    parts.clear();
    const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = max_tokens});
    return run_layer(layer, hidden.view(), DType::kF32);
  };
  const auto whole = run(23);
  EXPECT_EQ(parts, (Parts{{0, 23}}));
  EXPECT_TRUE(same_bits(run(22).out, whole.out));
  EXPECT_EQ(parts, (Parts{{0, 12}, {12, 11}}));
  EXPECT_TRUE(same_bits(run(10).out, whole.out));
  EXPECT_EQ(parts, (Parts{{0, 8}, {8, 8}, {16, 7}}));
}

// The rank with the most tokens decides the number of chunks; each rank cuts its own tokens
// equally.
TEST(ChunkedForward, RanksWithOtherNumbersOfTokens_CutTheirsIntoAsManyChunks) {
  const MoeSpec spec = noted_spec();
  const auto source = make_synthetic_source(spec, 7);
  const std::vector<int64_t> tokens = {25, 10, 2};
  std::vector<Parts> parts(3);
  const auto outcomes = testing::run_ranks(
      make_local_group({.num_ranks = 3}), [&](int32_t rank, Communicator& communicator) {
        const auto at = static_cast<size_t>(rank);
        Context context({.num_threads = 1, .communicator = &communicator});
        add_noting_router(context, parts[at]);
        const MoeLayer layer = MoeLayer::create(context, spec, *source, {.max_tokens = 10},
                                                {.ep_size = 3, .ep_rank = rank});
        const Tensor hidden = random_tensor(DType::kF32, tokens[at], 24, 3 + at);
        run_layer(layer, hidden.view(), DType::kF32);
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
  EXPECT_EQ(parts[0], (Parts{{0, 9}, {9, 8}, {17, 8}}));
  EXPECT_EQ(parts[1], (Parts{{0, 4}, {4, 3}, {7, 3}}));
  EXPECT_EQ(parts[2], (Parts{{0, 1}, {1, 1}}));
}

}  // namespace
}  // namespace conclave
