// Layers that go to other ranks through the C interface: with the bits of one rank before and
// afterwards, and what is refused.
#include "capi/arrays.h"
#include "capi/local_ranks.h"
#include "support/regroup_ranks.h"

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::Arrays;
using testing::expect_error;
using testing::Handle;
using testing::kArraysSpec;
using testing::kHidden;
using testing::local_group;
using testing::make;
using testing::on_threads;
using testing::place_in;
using testing::RankChange;
using testing::same_bits;
using testing::sized;
using testing::split_over;

using Group = std::vector<Handle<conclave_communicator>>;

Handle<conclave_spec> spec_of_arrays() {
  return make<conclave_spec>(&conclave_spec_from_json, kArraysSpec);
}

// A context for a rank of a group, or for one alone.
Handle<conclave_context> context_in(const Group& group, int32_t rank) {
  const bool is_one_of_several = rank >= 0 && group.size() > 1;
  return testing::context_of(is_one_of_several ? group[static_cast<size_t>(rank)].get() : nullptr);
}

Handle<conclave_layer> layer_over(const conclave_context* context, const Arrays& arrays,
                                  int32_t ranks, int32_t rank,
                                  const conclave_layer_options* options = nullptr) {
  const conclave_parallel parallel = split_over(ranks, static_cast<size_t>(rank));
  return make<conclave_layer>(&conclave_layer_create, context, spec_of_arrays().get(),
                              arrays.source.get(), options, &parallel);
}

Tensor forward(const conclave_layer* layer, const Tensor& hidden) {
  Tensor out(DType::kF32, hidden.shape());
  testing::forward(layer, hidden, out);
  return out;
}

class Regroups : public ::testing::Test {
 protected:
  Tensor of_one() const {
    const auto context = testing::make_context();
    return forward(layer_over(context.get(), arrays_, 1, 0).get(), hidden_);
  }

  Arrays arrays_{3};
  Tensor hidden_ = testing::random_tensor(DType::kBF16, 9, kHidden, 5);
};

TEST_F(Regroups, EveryRankHasTheBitsOfOne_BeforeAndAfterwards) {
  const Tensor expected = of_one();
  for (const RankChange& change : testing::rank_changes()) {
    SCOPED_TRACE(change.name);
    const Group everyone = local_group(change.everyone);
    const Group before = local_group(static_cast<int32_t>(change.before.size()));
    const Group after = local_group(static_cast<int32_t>(change.after.size()));
    on_threads(everyone.size(), [&](size_t at) {
      const int32_t old_rank = place_in(change.before, static_cast<int32_t>(at));
      const int32_t new_rank = place_in(change.after, static_cast<int32_t>(at));
      const auto old_context = context_in(before, old_rank);
      const auto new_context = context_in(after, new_rank);
      Handle<conclave_layer> layer;
      if (old_rank >= 0) {
        layer =
            layer_over(old_context.get(), arrays_, static_cast<int32_t>(before.size()), old_rank);
        EXPECT_TRUE(same_bits(forward(layer.get(), hidden_), expected));
      }
      auto options = sized<conclave_regroup_options>();
      options.everyone = everyone[at].get();
      options.piece_bytes = 4096;
      Handle<conclave_layer> next;
      if (new_rank < 0) {
        EXPECT_EQ(conclave_layer_hand_over(layer.get(), &options), CONCLAVE_OK)
            << conclave_last_error_message();
      } else if (layer != nullptr) {
        next =
            make<conclave_layer>(&conclave_layer_regroup, layer.get(), new_context.get(), &options);
      } else {
        next = make<conclave_layer>(&conclave_layer_join, new_context.get(), spec_of_arrays().get(),
                                    nullptr, &options);
      }
      if (layer != nullptr) {
        EXPECT_TRUE(same_bits(forward(layer.get(), hidden_), expected));
      }
      layer.reset();
      if (next != nullptr) {
        EXPECT_TRUE(same_bits(forward(next.get(), hidden_), expected));
      }
    });
  }
}

// One of two ranks has lost what it had and joins anew: its half comes from a source, if there is
// one, to where both ranks say.
TEST_F(Regroups, ASplitOfTheCallers_AndExpertsOfASource) {
  const Tensor expected = of_one();
  const std::vector<int32_t> rank_of = {1, 0, 1, 0, 1, 0};
  for (const bool has_source : {true, false}) {
    const Group everyone = local_group(2, 5000);
    const Group before = local_group(2);
    const Group after = local_group(2, 5000);
    on_threads(2, [&](size_t at) {
      const auto rank = static_cast<int32_t>(at);
      const auto old_context = context_in(before, rank);
      const auto context = context_in(after, rank);
      auto layer = layer_over(old_context.get(), arrays_, 2, rank);
      if (rank == 1) layer.reset();
      conclave_parallel parallel = split_over(2, at);
      parallel.placement = CONCLAVE_PLACEMENT_STRATEGY_CUSTOM;
      parallel.rank_of = rank_of.data();
      parallel.rank_of_count = rank_of.size();
      auto options = sized<conclave_regroup_options>();
      options.everyone = everyone[at].get();
      options.parallel = &parallel;
      if (has_source) options.source = arrays_.source.get();
      conclave_layer* out = nullptr;
      const conclave_status status =
          rank == 0
              ? conclave_layer_regroup(layer.get(), context.get(), &options, &out)
              : conclave_layer_join(context.get(), spec_of_arrays().get(), nullptr, &options, &out);
      const Handle<conclave_layer> next(out);
      if (!has_source) {
        EXPECT_NE(status, CONCLAVE_OK);
        EXPECT_EQ(out, nullptr);
        EXPECT_NE(std::string(conclave_last_error_message()).find("expert"), std::string::npos);
        return;
      }
      ASSERT_EQ(status, CONCLAVE_OK) << conclave_last_error_message();
      const auto slots = make<conclave_slots>(&conclave_layer_slots, next.get());
      auto info = sized<conclave_slots_info>();
      ASSERT_EQ(conclave_slots_get_info(slots.get(), &info), CONCLAVE_OK);
      EXPECT_EQ(std::vector<int32_t>(info.logical_of, info.logical_of + info.num_slots),
                (std::vector<int32_t>{1, 3, 5, 0, 2, 4}));
      EXPECT_TRUE(same_bits(forward(next.get(), hidden_), expected));
    });
  }
}

// One rank that asks for something else ends the change for all; the layers before serve on.
TEST_F(Regroups, RanksThatDisagree_AllHaveATypedError) {
  const Tensor expected = of_one();
  const Group everyone = local_group(2, 5000);
  const Group before = local_group(2);
  const Group after = local_group(2, 5000);
  std::vector<conclave_status> found(2);
  on_threads(2, [&](size_t at) {
    const auto rank = static_cast<int32_t>(at);
    const auto old_context = context_in(before, rank);
    const auto new_context = context_in(after, rank);
    const auto layer = layer_over(old_context.get(), arrays_, 2, rank);
    auto options = sized<conclave_regroup_options>();
    options.everyone = everyone[at].get();
    options.piece_bytes = at == 0 ? 4096 : 8192;
    conclave_layer* out = nullptr;
    found[at] = conclave_layer_regroup(layer.get(), new_context.get(), &options, &out);
    EXPECT_EQ(out, nullptr);
    EXPECT_STRNE(testing::last_error().phase, "");
    EXPECT_TRUE(same_bits(forward(layer.get(), hidden_), expected));
  });
  EXPECT_EQ(found[0], CONCLAVE_ERROR_COMM_MISMATCH);
  EXPECT_EQ(found[1], CONCLAVE_ERROR_COMM_MISMATCH);
}

TEST_F(Regroups, ARankThatDoesNotCome_IsNamed) {
  const Group everyone = local_group(2, 100);
  const auto context = testing::make_context();
  const auto layer = layer_over(context.get(), arrays_, 1, 0);
  auto options = sized<conclave_regroup_options>();
  options.everyone = everyone[0].get();
  expect_error(conclave_layer_hand_over(layer.get(), &options), CONCLAVE_ERROR_COMM_TIMEOUT, "");
  EXPECT_EQ(testing::last_error().peer, 1);
  EXPECT_TRUE(same_bits(forward(layer.get(), hidden_), of_one()));
}

TEST_F(Regroups, BadArguments_AreTypedErrors) {
  const Group everyone = local_group(1);
  const auto context = testing::make_context();
  const auto layer = layer_over(context.get(), arrays_, 1, 0);
  const auto spec = spec_of_arrays();
  conclave_layer* out = nullptr;
  const auto expect_refused = [&](const conclave_regroup_options* options, conclave_status status,
                                  const std::string& names) {
    expect_error(conclave_layer_regroup(layer.get(), context.get(), options, &out), status, names);
    expect_error(conclave_layer_join(context.get(), spec.get(), nullptr, options, &out), status,
                 names);
  };
  auto options = sized<conclave_regroup_options>();
  expect_refused(nullptr, CONCLAVE_ERROR_NULL_POINTER, "options");
  expect_refused(&options, CONCLAVE_ERROR_NULL_POINTER, "everyone");
  expect_error(conclave_layer_hand_over(layer.get(), &options), CONCLAVE_ERROR_NULL_POINTER,
               "everyone");
  options.everyone = everyone[0].get();
  options.struct_size = 4;
  expect_refused(&options, CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  options.struct_size = sizeof(options);
  auto parallel = split_over(1, 0);
  parallel.reduce = 7;
  options.parallel = &parallel;
  expect_refused(&options, CONCLAVE_ERROR_INVALID_ARGUMENT, "parallel.reduce");
  options.parallel = nullptr;
  expect_error(conclave_layer_regroup(nullptr, context.get(), &options, &out),
               CONCLAVE_ERROR_NULL_POINTER, "layer");
  expect_error(conclave_layer_regroup(layer.get(), nullptr, &options, &out),
               CONCLAVE_ERROR_NULL_POINTER, "context");
  expect_error(conclave_layer_regroup(layer.get(), context.get(), &options, nullptr),
               CONCLAVE_ERROR_NULL_POINTER, "out");
  expect_error(conclave_layer_join(context.get(), nullptr, nullptr, &options, &out),
               CONCLAVE_ERROR_NULL_POINTER, "spec");
  expect_error(conclave_layer_hand_over(nullptr, &options), CONCLAVE_ERROR_NULL_POINTER, "layer");
  // Everyone is told of these, and a group that has failed is of no more use.
  const auto expect_refused_alone = [&](const char* names) {
    const Group alone = local_group(1);
    options.everyone = alone[0].get();
    expect_error(conclave_layer_regroup(layer.get(), context.get(), &options, &out),
                 CONCLAVE_ERROR_INVALID_ARGUMENT, names);
  };
  options.processor_share = -1;
  expect_refused_alone("processor_share");
  options.processor_share = 0;
  options.piece_bytes = 17;
  expect_refused_alone("piece_bytes");
  EXPECT_EQ(out, nullptr);
}

TEST_F(Regroups, InPlaceWeights_AreRefusedWithTheReason) {
  const Group everyone = local_group(1);
  const auto context = testing::make_context();
  auto in_place = sized<conclave_layer_options>();
  in_place.weights = CONCLAVE_WEIGHT_USE_IN_PLACE;
  const auto layer = layer_over(context.get(), arrays_, 1, 0, &in_place);
  auto options = sized<conclave_regroup_options>();
  options.everyone = everyone[0].get();
  conclave_layer* out = nullptr;
  expect_error(conclave_layer_regroup(layer.get(), context.get(), &options, &out),
               CONCLAVE_ERROR_UNSUPPORTED, "source's memory");
}

TEST_F(Regroups, SpreadSlots_KeepExpertsWhereTheyAre) {
  const std::vector<int32_t> logical_of = {0, 1, 2, 3, 4, 5};
  const std::vector<int32_t> first_of = {0, 3, 6};
  const auto before = make<conclave_slots>(&conclave_slots_create, int64_t{6}, logical_of.data(),
                                           logical_of.size(), first_of.data(), size_t{2});
  const std::vector<int32_t> old_ranks = {1, -1, 0};
  const auto after = make<conclave_slots>(&conclave_slots_spread, before.get(), old_ranks.data(),
                                          old_ranks.size());
  auto info = sized<conclave_slots_info>();
  ASSERT_EQ(conclave_slots_get_info(after.get(), &info), CONCLAVE_OK);
  ASSERT_EQ(info.num_ranks, 3U);
  EXPECT_EQ(info.num_slots, 6U);
  for (int32_t slot = info.first_of[0]; slot < info.first_of[1]; ++slot) {
    EXPECT_GE(info.logical_of[slot], 3);
  }
  conclave_slots* out = nullptr;
  const auto expect_refused = [&](const int32_t* ranks, size_t count, conclave_status status) {
    expect_error(conclave_slots_spread(before.get(), ranks, count, &out), status, "old_ranks");
  };
  const std::vector<int32_t> twice = {0, 0};
  const std::vector<int32_t> beyond = {0, 2};
  expect_refused(twice.data(), 2, CONCLAVE_ERROR_INVALID_ARGUMENT);
  expect_refused(beyond.data(), 2, CONCLAVE_ERROR_INVALID_ARGUMENT);
  expect_refused(twice.data(), 0, CONCLAVE_ERROR_INVALID_ARGUMENT);
  expect_refused(nullptr, 2, CONCLAVE_ERROR_NULL_POINTER);
  expect_refused(reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(twice.data()) + 1),
                 1, CONCLAVE_ERROR_MISALIGNED);
  expect_error(conclave_slots_spread(before.get(), twice.data(), size_t{1} << 40, &out),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "num_ranks");
  EXPECT_EQ(out, nullptr);
}

}  // namespace
}  // namespace conclave
