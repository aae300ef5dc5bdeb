// Runs vLLM's own cases of moe_align_block_size and moe_permute / moe_unpermute against plain
// recomputation.
#include "conclave/error.h"
#include "conclave/permute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace conclave {
namespace {

// k distinct experts per token, as a router gives.
Tensor random_ids(int64_t tokens, int64_t top_k, int64_t experts, uint32_t seed) {
  std::mt19937 generator(seed);
  Tensor ids(DType::kI32, {tokens, top_k});
  std::vector<int32_t> all(static_cast<size_t>(experts));
  std::iota(all.begin(), all.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < top_k; ++j) {
      std::uniform_int_distribution<size_t> pick(static_cast<size_t>(j), all.size() - 1);
      std::swap(all[static_cast<size_t>(j)], all[pick(generator)]);
      ids.as<int32_t>()[t * top_k + j] = all[static_cast<size_t>(j)];
    }
  }
  return ids;
}

// The experts of rank 0 of `ranks` in linear placement; empty for one rank.
std::vector<int32_t> expert_map(int64_t experts, int64_t ranks) {
  if (ranks == 1) return {};
  std::vector<int32_t> map(static_cast<size_t>(experts), -1);
  const int64_t local = (experts + ranks - 1) / ranks;
  for (int64_t e = 0; e < local; ++e) map[static_cast<size_t>(e)] = static_cast<int32_t>(e);
  return map;
}

int32_t local_of(int32_t id, int64_t experts, const std::vector<int32_t>& map) {
  if (id < 0 || id >= experts) return -1;
  return map.empty() ? id : map[static_cast<size_t>(id)];
}

using AlignCase = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;  // M, k, E, block, ranks

class VllmMatrixAlign : public ::testing::TestWithParam<AlignCase> {};

TEST_P(VllmMatrixAlign, Blocks_HoldEverySlotOnceInOrder) {
  const auto [tokens, top_k, experts, block, ranks] = GetParam();
  const Tensor ids = random_ids(tokens, top_k, experts, 7);
  const std::vector<int32_t> map = expert_map(experts, ranks);
  const ExpertSelection selection{.num_experts = experts, .local_of = map};
  const BlockAlignment actual = align_block_size(ids.view(), block, selection);

  std::vector<int32_t> slots;
  std::vector<int32_t> experts_of_blocks;
  for (int32_t expert = 0; expert < experts; ++expert) {
    size_t rows = 0;
    for (int64_t slot = 0; slot < tokens * top_k; ++slot) {
      if (local_of(ids.as<int32_t>()[slot], experts, map) != expert) continue;
      slots.push_back(static_cast<int32_t>(slot));
      ++rows;
    }
    for (; rows % static_cast<size_t>(block) != 0; ++rows) {
      slots.push_back(static_cast<int32_t>(tokens * top_k));
    }
    experts_of_blocks.insert(experts_of_blocks.end(), rows / static_cast<size_t>(block), expert);
  }
  EXPECT_EQ(actual.num_padded, static_cast<int64_t>(slots.size()));
  EXPECT_EQ(actual.slots, slots);
  EXPECT_EQ(actual.expert_of_block, experts_of_blocks);
  const int64_t bound = tokens * top_k + experts * (block - 1);
  EXPECT_LE(actual.num_padded, (bound + block - 1) / block * block);
  // A second run must give the same order.
  EXPECT_EQ(align_block_size(ids.view(), block, selection).slots, actual.slots);
}

INSTANTIATE_TEST_SUITE_P(Cases, VllmMatrixAlign,
                         ::testing::Combine(::testing::Values(1, 3, 256, 2256, 4096),
                                            ::testing::Values(1, 2, 16, 32),
                                            ::testing::Values(32, 160, 256, 257),
                                            ::testing::Values(32, 128), ::testing::Values(1)));
INSTANTIATE_TEST_SUITE_P(ExpertMap, VllmMatrixAlign,
                         ::testing::Combine(::testing::Values(16, 32), ::testing::Values(2, 4),
                                            ::testing::Values(8), ::testing::Values(64),
                                            ::testing::Values(2, 4)));

using PermuteCase = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;  // M, K, E, k, ranks

class VllmMatrixPermute : public ::testing::TestWithParam<PermuteCase> {};

TEST_P(VllmMatrixPermute, RowsAreGroupedAndComeBack) {
  const auto [tokens, width, experts, top_k, ranks] = GetParam();
  const Tensor ids = random_ids(tokens, top_k, experts, 11);
  const std::vector<int32_t> map = expert_map(experts, ranks);
  std::mt19937 generator(3);
  std::normal_distribution<float> normal;
  Tensor hidden(DType::kF32, {tokens, width});
  for (int64_t i = 0; i < tokens * width; ++i) hidden.as<float>()[i] = normal(generator);
  Tensor rounded(DType::kBF16, {tokens, width});
  convert(hidden.view(), rounded.view());
  convert(rounded.view(), hidden.view());

  const PermutedRows permuted =
      permute_rows(rounded.view(), ids.view(), {.num_experts = experts, .local_of = map});
  // The expected order is a stable sort of the local slots by expert.
  std::vector<int64_t> expected;
  for (int64_t slot = 0; slot < tokens * top_k; ++slot) {
    if (local_of(ids.as<int32_t>()[slot], experts, map) >= 0) expected.push_back(slot);
  }
  std::stable_sort(expected.begin(), expected.end(), [&](int64_t a, int64_t b) {
    return ids.as<int32_t>()[a] < ids.as<int32_t>()[b];
  });
  EXPECT_EQ(permuted.slot_of_row, expected);
  ASSERT_EQ(permuted.rows.shape(), (Shape{static_cast<int64_t>(expected.size()), width}));
  bool equal = true;
  for (size_t row = 0; row < expected.size(); ++row) {
    equal =
        equal && std::equal(permuted.rows.as<uint16_t>() + static_cast<int64_t>(row) * width,
                            permuted.rows.as<uint16_t>() + static_cast<int64_t>(row + 1) * width,
                            rounded.as<uint16_t>() + expected[row] / top_k * width);
  }
  EXPECT_TRUE(equal);
  EXPECT_EQ(permuted.expert_first_row.back(), permuted.rows.shape()[0]);

  Tensor weights(DType::kF32, {tokens, top_k});
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    weights.as<float>()[i] = std::abs(normal(generator));
  }
  Tensor out(DType::kBF16, {tokens, width});
  unpermute_rows(permuted.rows.view(), permuted.row_of_slot, weights.view(), out.view());
  Tensor widened(DType::kF32, {tokens, width});
  convert(out.view(), widened.view());
  double worst = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    double share = 0;
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t at = t * top_k + j;
      if (local_of(ids.as<int32_t>()[at], experts, map) < 0) continue;
      share += static_cast<double>(weights.as<float>()[at]);
    }
    for (int64_t c = 0; c < width; ++c) {
      const double exact = share * static_cast<double>(hidden.as<float>()[t * width + c]);
      const double error =
          std::abs(static_cast<double>(widened.as<float>()[t * width + c]) - exact);
      worst = std::max(worst, error / std::max(std::abs(exact), 1e-30));
    }
  }
  // The bar is one rounding to bf16 (2^-9 relative) after float32 sums of k positive multiples.
  EXPECT_LE(worst, 0x1p-8 + static_cast<double>(top_k) * 0x1p-23);
}

// The widths of the original (2048, 7168) copy the same bytes more often; one of each is enough.
INSTANTIATE_TEST_SUITE_P(Cases, VllmMatrixPermute,
                         ::testing::Combine(::testing::Values(1, 33, 1024), ::testing::Values(256),
                                            ::testing::Values(16, 64, 256),
                                            ::testing::Values(2, 6, 8),
                                            ::testing::Values(1, 4, 16)));
INSTANTIATE_TEST_SUITE_P(Wide, VllmMatrixPermute,
                         ::testing::Values(PermuteCase{33, 2048, 64, 6, 4},
                                           PermuteCase{33, 7168, 256, 8, 16},
                                           PermuteCase{5000, 128, 256, 8, 4}));

TEST(VllmMatrixPermuteInvalid, IdsOutOfRange_HaveNoRow) {
  Tensor hidden(DType::kF32, {5, 8});
  for (int64_t i = 0; i < 40; ++i) hidden.as<float>()[i] = static_cast<float>(i);
  Tensor ids(DType::kI32, {5, 1});
  const int32_t values[] = {0, -1, 1, 4, 2};
  std::copy_n(values, 5, ids.as<int32_t>());
  const PermutedRows permuted = permute_rows(hidden.view(), ids.view(), {.num_experts = 4});
  EXPECT_EQ(permuted.slot_of_row, (std::vector<int64_t>{0, 2, 4}));
  EXPECT_EQ(permuted.row_of_slot, (std::vector<int64_t>{0, -1, 1, -1, 2}));
  EXPECT_EQ(permuted.expert_first_row, (std::vector<int64_t>{0, 1, 2, 3, 3}));
  Tensor weights(DType::kF32, {5, 1});
  std::fill_n(weights.as<float>(), 5, 1.0F);
  Tensor out(DType::kF32, {5, 8});
  std::fill_n(out.as<float>(), 40, -7.0F);
  unpermute_rows(permuted.rows.view(), permuted.row_of_slot, weights.view(), out.view());
  EXPECT_EQ(out.as<float>()[8], 0.0F);
  EXPECT_EQ(out.as<float>()[16], 16.0F);
}

TEST(PermuteRows, WrongArguments_AreNamed) {
  const Tensor ids(DType::kI32, {2, 2});
  const Tensor hidden(DType::kF32, {3, 8});
  const auto message = [](auto call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_NE(message([&] {
              permute_rows(hidden.view(), ids.view(), {.num_experts = 4});
            }).find("topk_ids"),
            std::string::npos);
  EXPECT_NE(
      message([&] { align_block_size(ids.view(), 0, {.num_experts = 4}); }).find("block_size"),
      std::string::npos);
  EXPECT_NE(
      message([&] { align_block_size(hidden.view(), 8, {.num_experts = 4}); }).find("topk_ids"),
      std::string::npos);
  const std::vector<int32_t> map = {0, 7};
  EXPECT_NE(message([&] {
              align_block_size(ids.view(), 8, {.num_experts = 2, .local_of = map});
            }).find("local_of"),
            std::string::npos);
  const std::vector<int64_t> rows = {0, 1, 2, 9};
  Tensor out(DType::kF32, {2, 8});
  const Tensor weights(DType::kF32, {2, 2});
  EXPECT_NE(message([&] {
              unpermute_rows(hidden.view(), rows, weights.view(), out.view());
            }).find("row_of_slot"),
            std::string::npos);
}

TEST(PermuteRows, ExpertMaps_HoldLocalExpertsOrMinusOne) {
  const Tensor ids(DType::kI32, {2, 2});
  const Tensor hidden(DType::kF32, {2, 8});
  for (const int32_t entry :
       {-2, 2, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    const std::vector<int32_t> map = {0, entry};
    const ExpertSelection selection{.num_experts = 2, .local_of = map};
    const auto expect_refused = [&](auto call) {
      try {
        call();
        ADD_FAILURE() << "accepted " << entry;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        EXPECT_EQ(error.detail().found, std::to_string(entry));
      }
    };
    expect_refused([&] { align_block_size(ids.view(), 8, selection); });
    expect_refused([&] { permute_rows(hidden.view(), ids.view(), selection); });
  }
  for (const int32_t entry : {-1, 1}) {
    const std::vector<int32_t> map = {0, entry};
    EXPECT_EQ(align_block_size(ids.view(), 8, {.num_experts = 2, .local_of = map}).num_padded, 8);
  }
}

TEST(PermuteRows, SlotsAndPaddingBeyond31Bits_AreRefused) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  // Nothing is local, so there are no blocks of any size.
  Tensor ids(DType::kI32, {2, 2});
  std::fill_n(ids.as<int32_t>(), 4, -1);
  for (const int64_t experts : {1, 2, 3, 256}) {
    const int64_t largest = (kMost - 4) / experts;
    EXPECT_EQ(align_block_size(ids.view(), largest, {.num_experts = experts}).num_padded, 0);
    for (const int64_t block :
         {largest + 1, kMost + 1, std::numeric_limits<int64_t>::max() / experts}) {
      try {
        align_block_size(ids.view(), block, {.num_experts = experts});
        ADD_FAILURE() << "accepted " << block << " of " << experts << " experts";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        EXPECT_EQ(error.detail().found, std::to_string(block));
      }
    }
  }
}

// The rows of `dense` with `gap` more elements between them, which hold the value -7 or the id 1.
Tensor spread(const Tensor& dense, int64_t gap) {
  const int64_t width = dense.shape()[1];
  Tensor apart(dense.dtype(), {dense.shape()[0], width + gap});
  const auto copy = [&](auto fill) {
    using Element = decltype(fill);
    std::fill_n(apart.as<Element>(), apart.shape().num_elements(), fill);
    for (int64_t row = 0; row < dense.shape()[0]; ++row) {
      std::copy_n(dense.as<Element>() + row * width, width,
                  apart.as<Element>() + row * (width + gap));
    }
  };
  if (dense.dtype() == DType::kI32) {
    copy(int32_t{1});
  } else {
    copy(-7.0F);
  }
  return apart;
}

TEST(PermuteRows, StridedArguments_GiveTheBitsOfDenseOnes) {
  const Tensor ids = random_ids(7, 3, 5, 41);
  Tensor hidden(DType::kF32, {7, 6});
  Tensor weights(DType::kF32, {7, 3});
  std::mt19937 generator(43);
  std::normal_distribution<float> normal;
  std::generate_n(hidden.as<float>(), 7 * 6, [&] { return normal(generator); });
  std::generate_n(weights.as<float>(), 7 * 3, [&] { return normal(generator); });
  const PermutedRows dense = permute_rows(hidden.view(), ids.view(), {.num_experts = 5});
  Tensor sums(DType::kF32, {7, 6});
  unpermute_rows(dense.rows.view(), dense.row_of_slot, weights.view(), sums.view());

  // Each tensor has a different gap, so that no stride can stand for another.
  const auto apart = [](const Tensor& tensor, int64_t width) {
    return ConstTensorView{
        tensor.as<std::byte>(), tensor.dtype(), {tensor.shape()[0], width}, tensor.shape()[1]};
  };
  const Tensor wide_ids = spread(ids, 2);
  const Tensor wide_hidden = spread(hidden, 1);
  const PermutedRows actual =
      permute_rows(apart(wide_hidden, 6), apart(wide_ids, 3), {.num_experts = 5});
  EXPECT_EQ(actual.row_of_slot, dense.row_of_slot);
  EXPECT_EQ(align_block_size(apart(wide_ids, 3), 4, {.num_experts = 5}).slots,
            align_block_size(ids.view(), 4, {.num_experts = 5}).slots);

  const Tensor wide_rows = spread(actual.rows, 3);
  const Tensor wide_weights = spread(weights, 4);
  Tensor wide_sums(DType::kF32, {7, 11});
  std::fill_n(wide_sums.as<float>(), 7 * 11, -7.0F);
  unpermute_rows(apart(wide_rows, 6), actual.row_of_slot, apart(wide_weights, 3),
                 {wide_sums.as<float>(), DType::kF32, {7, 6}, 11});
  const Tensor expected = spread(sums, 5);
  EXPECT_TRUE(
      std::equal(wide_sums.as<float>(), wide_sums.as<float>() + 7 * 11, expected.as<float>()));
}

}  // namespace
}  // namespace conclave
