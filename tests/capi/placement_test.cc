// Places of experts, and experts that move, through the C interface: no bit of a result changes.
#include "capi/local_ranks.h"
#include "support/layer_fixture.h"

#include "conclave/balance.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::context_of;
using testing::expect_error;
using testing::Handle;
using testing::local_group;
using testing::make;
using testing::on_threads;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;

constexpr int64_t kExperts = 60;

// All experts in order, the first half of the numbers on the first rank, turned by `shift`.
Handle<conclave_slots> turned(int32_t shift) {
  std::vector<int32_t> logical;
  for (int32_t i = 0; i < kExperts; ++i) {
    logical.push_back((i + shift) % static_cast<int32_t>(kExperts));
  }
  const int32_t first_of[] = {0, 30, 60};
  return make<conclave_slots>(&conclave_slots_create, kExperts, logical.data(), logical.size(),
                              first_of, size_t{2});
}

std::vector<int32_t> of_rank(const conclave_slots* slots, size_t rank) {
  auto info = sized<conclave_slots_info>();
  EXPECT_EQ(conclave_slots_get_info(slots, &info), CONCLAVE_OK);
  EXPECT_LT(rank, info.num_ranks);
  std::vector<int32_t> experts(info.logical_of + info.first_of[rank],
                               info.logical_of + info.first_of[rank + 1]);
  std::ranges::sort(experts);
  return experts;
}

TEST(Slots, BadArrays_NameTheElement) {
  const int32_t logical[] = {0, 1, 2, 3};
  const auto expect = [&](int64_t experts, const int32_t* of, size_t count,
                          std::vector<int32_t> first_of, const char* names,
                          conclave_status status = CONCLAVE_ERROR_INVALID_ARGUMENT) {
    conclave_slots* out = nullptr;
    expect_error(
        conclave_slots_create(experts, of, count, first_of.data(), first_of.size() - 1, &out),
        status, names);
    EXPECT_EQ(out, nullptr);
  };
  expect(0, logical, 4, {0, 4}, "num_experts");
  expect(int64_t{1} << 40, logical, 4, {0, 4}, "num_experts");
  expect(3, logical, 4, {0, 4}, "logical_of[3]");
  expect(4, logical, 4, {1, 4}, "first_of[0]");
  expect(4, logical, 4, {0, 3}, "first_of[1]");
  expect(4, logical, 4, {0, 5}, "first_of[1]");
  expect(4, logical, 4, {0, 3, 2, 4}, "first_of[2]");
  expect(4, logical, 4, {0, -1, 4}, "first_of[1]");
  expect(4, logical, 4, {0}, "num_ranks");
  expect(4, logical, ~size_t{0}, {0, 4}, "num_slots");
  expect(4, nullptr, 4, {0, 4}, "logical_of", CONCLAVE_ERROR_NULL_POINTER);
  const auto* const crooked =
      reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(logical) + 1);
  expect(4, crooked, 3, {0, 3}, "logical_of", CONCLAVE_ERROR_MISALIGNED);
  conclave_slots* out = nullptr;
  const int32_t first_of[] = {0, 4};
  expect_error(conclave_slots_create(4, logical, 4, first_of, ~size_t{0}, &out),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "num_ranks");
  expect_error(conclave_slots_create(4, logical, 4, nullptr, 1, &out), CONCLAVE_ERROR_NULL_POINTER,
               "first_of");
  auto parallel = sized<conclave_parallel>();
  parallel.ep_size = -1;
  expect_error(conclave_slots_from_parallel(4, &parallel, &out), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "num_ranks");
  expect_error(conclave_slots_from_parallel(-4, nullptr, &out), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "num_experts");
  parallel.ep_size = 1;
  parallel.rank_of_count = ~size_t{0};
  expect_error(conclave_slots_from_parallel(4, &parallel, &out), CONCLAVE_ERROR_INVALID_ARGUMENT,
               "rank_of_count");
}

TEST(Slots, Balance_IsThatOfCpp) {
  std::vector<double> load(kExperts);
  for (size_t i = 0; i < load.size(); ++i) load[i] = static_cast<double>(i * i % 37);
  auto options = sized<conclave_balance_options>();
  options.rule = "global";
  options.num_ranks = 4;
  options.num_redundant_experts = 4;
  const auto slots =
      make<conclave_slots>(&conclave_slots_balance, load.data(), load.size(), &options);
  const ExpertSlots expected =
      balance_experts(load, {.rule = "global", .num_ranks = 4, .num_redundant_experts = 4});
  auto info = sized<conclave_slots_info>();
  ASSERT_EQ(conclave_slots_get_info(slots.get(), &info), CONCLAVE_OK);
  ASSERT_EQ(info.num_slots, expected.logical_of.size());
  EXPECT_TRUE(std::equal(expected.logical_of.begin(), expected.logical_of.end(), info.logical_of));
  EXPECT_TRUE(std::equal(expected.first_of.begin(), expected.first_of.end(), info.first_of));
  double perfect = 0;
  ASSERT_EQ(conclave_slots_balancedness(slots.get(), load.data(), load.size(), &perfect),
            CONCLAVE_OK);
  EXPECT_EQ(perfect, balancedness(load, expected));

  options.rule = "steady";
  options.previous = slots.get();
  const auto steady =
      make<conclave_slots>(&conclave_slots_balance, load.data(), load.size(), &options);
  int64_t moved = -1;
  ASSERT_EQ(conclave_slots_moved(slots.get(), steady.get(), &moved), CONCLAVE_OK);
  EXPECT_LE(moved, 4);

  const auto expect = [&](const char* names) {
    conclave_slots* out = nullptr;
    expect_error(conclave_slots_balance(load.data(), load.size(), &options, &out),
                 CONCLAVE_ERROR_INVALID_ARGUMENT, names);
  };
  options.rule = "by the moon";
  expect("rule");
  options.rule = "global";
  options.num_ranks = 1 << 30;
  expect("num_ranks");
  options.num_ranks = -1;
  expect("num_ranks");
  options.num_ranks = 4;
  options.num_redundant_experts = std::numeric_limits<int32_t>::max();
  expect("num_redundant_experts");
  options.num_redundant_experts = 4;
  options.flags = 2;
  expect("flags");
  options.flags = 0;
  load[3] = std::numeric_limits<double>::quiet_NaN();
  expect("load");
  conclave_slots* out = nullptr;
  expect_error(conclave_slots_balance(nullptr, 4, &options, &out), CONCLAVE_ERROR_NULL_POINTER,
               "load");
  expect_error(conclave_slots_balance(load.data(), ~size_t{0}, &options, &out),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "num_experts");
  EXPECT_NE(conclave_slots_balance(load.data(), 0, &options, &out), CONCLAVE_OK);
}

std::vector<int32_t> places_of(const std::vector<double>& load,
                               const conclave_balance_options& options) {
  const auto slots =
      make<conclave_slots>(&conclave_slots_balance, load.data(), load.size(), &options);
  auto info = sized<conclave_slots_info>();
  EXPECT_EQ(conclave_slots_get_info(slots.get(), &info), CONCLAVE_OK);
  return {info.logical_of, info.logical_of + info.num_slots};
}

// Each option has the effect that it has in C++, and has one.
TEST(Slots, EveryOptionOfABalance_Counts) {
  int nodes_count = 0;
  int shared_ranks_count = 0;
  int gain_counts = 0;
  for (uint32_t seed = 0; seed < 24; ++seed) {
    std::mt19937 random(seed);
    std::vector<double> load(16);
    for (double& one : load) one = static_cast<double>(random() % 64 * (random() % 64));
    auto options = sized<conclave_balance_options>();
    options.num_ranks = 4;
    options.num_redundant_experts = 8;
    BalanceRequest request{.num_ranks = 4, .num_redundant_experts = 8};
    const std::vector<int32_t> before = balance_experts(load, request).logical_of;
    EXPECT_EQ(places_of(load, options), before);
    options.flags = CONCLAVE_BALANCE_SHARED_RANKS;
    request.distinct_ranks = false;
    const std::vector<int32_t> shared = balance_experts(load, request).logical_of;
    EXPECT_EQ(places_of(load, options), shared);
    shared_ranks_count += shared != before ? 1 : 0;
    options.flags = 0;
    request.distinct_ranks = true;
    options.num_nodes = 2;
    options.num_groups = 4;
    request.num_nodes = 2;
    request.num_groups = 4;
    const std::vector<int32_t> by_node = balance_experts(load, request).logical_of;
    EXPECT_EQ(places_of(load, options), by_node);
    nodes_count += by_node != before ? 1 : 0;

    const auto now =
        make<conclave_slots>(&conclave_slots_balance, load.data(), load.size(), &options);
    std::ranges::shuffle(load, random);
    options = sized<conclave_balance_options>();
    options.rule = "steady";
    options.num_ranks = 4;
    options.num_redundant_experts = 8;
    options.previous = now.get();
    options.least_gain = 0.5;
    request = {.rule = "steady",
               .num_ranks = 4,
               .num_redundant_experts = 8,
               .previous = by_node,
               .least_gain = 0.5};
    const std::vector<int32_t> few = balance_experts(load, request).logical_of;
    EXPECT_EQ(places_of(load, options), few);
    request.least_gain = 0.01;
    gain_counts += balance_experts(load, request).logical_of != few ? 1 : 0;
  }
  EXPECT_GT(nodes_count, 0);
  EXPECT_GT(shared_ranks_count, 0);
  EXPECT_GT(gain_counts, 0);
}

// A rank with a layer whose experts may move.
struct Rank {
  explicit Rank(conclave_communicator* communicator, size_t rank, int32_t spare = 2)
      : context(context_of(communicator)) {
    const auto checkpoint = testing::open_model();
    auto parallel = sized<conclave_parallel>();
    parallel.ep_size = 2;
    parallel.ep_rank = static_cast<int32_t>(rank);
    auto options = sized<conclave_layer_options>();
    options.max_tokens = 16;
    options.spare_experts = spare;
    layer = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(),
                                 checkpoint.get(), int64_t{0}, &options, &parallel);
  }

  Tensor forward(const conclave_layer* of = nullptr) const {
    Tensor out(DType::kF32, hidden.shape());
    const conclave_tensor in = tensor_of(hidden.const_view());
    const conclave_tensor written = tensor_of(out.const_view());
    auto args = sized<conclave_forward_args>();
    args.hidden = &in;
    args.out = &written;
    EXPECT_EQ(conclave_layer_forward(of != nullptr ? of : layer.get(), &args), CONCLAVE_OK)
        << conclave_last_error_message();
    return out;
  }
  uint64_t epoch() const {
    auto stats = sized<conclave_layer_stats>();
    EXPECT_EQ(conclave_layer_get_stats(layer.get(), &stats), CONCLAVE_OK);
    return stats.placement_epoch;
  }

  Handle<conclave_context> context;
  Handle<conclave_layer> layer;
  Tensor hidden = testing::random_tensor(DType::kBF16, 5, 88, 4);
};

TEST(Moving, UpdatePlacement_KeepsEveryBit) {
  auto group = local_group(2);
  on_threads(2, [&](size_t rank) {
    const Rank mine(group[rank].get(), rank);
    const Tensor expected = mine.forward();
    for (const int32_t shift : {3, 0}) {
      const auto next = turned(shift);
      EXPECT_EQ(conclave_layer_update_placement(mine.layer.get(), next.get(), nullptr), CONCLAVE_OK)
          << conclave_last_error_message();
      EXPECT_TRUE(same_bits(mine.forward(), expected));
      const auto now = make<conclave_slots>(&conclave_layer_slots, mine.layer.get());
      EXPECT_EQ(of_rank(now.get(), rank), of_rank(next.get(), rank));
    }
    EXPECT_GT(mine.epoch(), 0U);
  });
}

TEST(Moving, AMigration_GoesOnBesideForwards_AndItsHandlesMayEndInAnyOrder) {
  auto group = local_group(2);
  auto second = local_group(2);
  on_threads(2, [&](size_t rank) {
    Rank mine(group[rank].get(), rank);
    group[rank].reset();
    const Tensor expected = mine.forward();
    auto next = turned(2);
    const auto wanted = of_rank(next.get(), rank);
    auto options = sized<conclave_migration_options>();
    options.communicator = second[rank].get();
    options.processor_share = 1;
    options.piece_bytes = 4096;
    auto migration = make<conclave_migration>(&conclave_migration_create, mine.layer.get(),
                                              next.get(), &options);
    second[rank].reset();  // the migration holds it
    next.reset();
    auto status = sized<conclave_migration_status>();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (status.is_done == 0 && std::chrono::steady_clock::now() < until) {
      EXPECT_TRUE(same_bits(mine.forward(), expected));
      EXPECT_EQ(conclave_migration_get_status(migration.get(), &status), CONCLAVE_OK);
      if (mine.epoch() >= static_cast<uint64_t>(status.rounds)) break;
    }
    EXPECT_EQ(conclave_migration_finish(migration.get()), CONCLAVE_OK)
        << conclave_last_error_message();
    EXPECT_EQ(conclave_migration_check(migration.get()), CONCLAVE_OK);
    EXPECT_EQ(conclave_migration_get_status(migration.get(), &status), CONCLAVE_OK);
    EXPECT_EQ(status.is_done, 1);
    EXPECT_EQ(status.has_failed, 0);
    EXPECT_GT(status.experts_moved, 0);
    const auto now = make<conclave_slots>(&conclave_layer_slots, mine.layer.get());
    EXPECT_EQ(of_rank(now.get(), rank), wanted);
    // One at a time.
    const auto back = turned(0);
    expect_error(conclave_layer_update_placement(mine.layer.get(), back.get(), nullptr),
                 CONCLAVE_ERROR_STATE, "");
    mine.layer.reset();
    mine.context.reset();
    EXPECT_EQ(conclave_migration_get_status(migration.get(), &status), CONCLAVE_OK);
    migration.reset();
  });
}

TEST(Moving, BadRequests_AreTypedErrors) {
  auto group = local_group(1);
  const auto context = context_of(group[0].get());
  const auto checkpoint = testing::open_model();
  const auto layer = make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(),
                                          checkpoint.get(), int64_t{0}, nullptr, nullptr);
  const auto expect = [&](const conclave_slots* slots, const conclave_migration_options* options,
                          conclave_status status, const char* names) {
    expect_error(conclave_layer_update_placement(layer.get(), slots, options), status, names);
    conclave_migration* out = nullptr;
    EXPECT_NE(conclave_migration_create(layer.get(), slots, options, &out), CONCLAVE_OK);
    EXPECT_EQ(out, nullptr);
  };
  const auto two = turned(0);
  expect(two.get(), nullptr, CONCLAVE_ERROR_INVALID_ARGUMENT, "");
  const auto one = make<conclave_slots>(&conclave_layer_slots, layer.get());
  auto options = sized<conclave_migration_options>();
  options.piece_bytes = 1;
  expect(one.get(), &options, CONCLAVE_ERROR_INVALID_ARGUMENT, "piece_bytes");
  options.piece_bytes = 0;
  options.processor_share = -1;
  expect(one.get(), &options, CONCLAVE_ERROR_INVALID_ARGUMENT, "processor_share");
  options.struct_size = 0;
  expect(one.get(), &options, CONCLAVE_ERROR_INVALID_ARGUMENT, "options.struct_size");
  conclave_migration* out = nullptr;
  expect_error(conclave_migration_create(layer.get(), one.get(), nullptr, &out),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "communicator");
}

// Ranks that ask for different places learn of it, and stay where they are.
TEST(Moving, RanksThatDisagree_KeepTheirPlaces) {
  auto group = local_group(2, 5000);
  on_threads(2, [&](size_t rank) {
    const Rank mine(group[rank].get(), rank);
    const Tensor expected = mine.forward();
    const auto next = turned(rank == 0 ? 1 : 2);
    expect_error(conclave_layer_update_placement(mine.layer.get(), next.get(), nullptr),
                 CONCLAVE_ERROR_COMM_MISMATCH, "");
    EXPECT_EQ(mine.epoch(), 0U);
  });
}

// A migration that is ended early leaves a layer that serves on.
TEST(Moving, EndedEarly_TheLayerServesOn) {
  auto group = local_group(2);
  auto second = local_group(2);
  on_threads(2, [&](size_t rank) {
    const Rank mine(group[rank].get(), rank);
    const Tensor expected = mine.forward();
    const auto next = turned(2);
    auto options = sized<conclave_migration_options>();
    options.communicator = second[rank].get();
    {
      const auto migration = make<conclave_migration>(&conclave_migration_create, mine.layer.get(),
                                                      next.get(), &options);
    }
    EXPECT_TRUE(same_bits(mine.forward(), expected));
  });
}

}  // namespace
}  // namespace conclave
