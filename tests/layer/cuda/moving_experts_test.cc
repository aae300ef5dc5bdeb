// Experts that move between two GPUs between two forwards: whatever their format, each rank has the
// bytes of a layer that was made there, and computes the same bits.
#include "cuda/check.h"
#include "cuda/stream.h"
#include "layer/random_adapter.h"
#include "moving_ranks.h"

#include "conclave/interop/cuda.h"
#include "conclave/lora.h"
#include "conclave/migration.h"
#include "conclave/refit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::by_rank;
using testing::call_of;
using testing::code_of;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::experts_of_rank;
using testing::first_failure;
using testing::kMovingExperts;
using testing::MovingCase;
using testing::NcclTest;
using testing::on_nccl_ranks;
using testing::one_choice;
using testing::RankCall;
using testing::run_call;
using testing::run_nccl_ranks;
using testing::same_bits;
using testing::slots_with;
using testing::split_of;
using testing::TokensOfRanks;

constexpr double kBar = 6e-3;
const LayerOptions kOptions{.max_tokens = 128, .spare_experts = 2};

class CudaMovingExperts : public NcclTest {};

// The calls of a rank and what they gave: few rows and many take other kernels.
class Outputs {
 public:
  Outputs(DeviceLayer& owned, const MoeSpec& spec, int32_t rank, DType rows) : owned_(owned) {
    for (const int64_t tokens : {0, 3, 70}) {
      calls_.push_back(call_of(spec, rank, tokens + (tokens > 0 ? rank : 0), rows));
      before_.push_back(run_call(owned, calls_.back(), DType::kF32));
    }
  }
  bool are_the_same() const {
    for (size_t i = 0; i < calls_.size(); ++i) {
      if (!same_bits(run_call(owned_, calls_[i], DType::kF32), before_[i])) return false;
    }
    return true;
  }

 private:
  DeviceLayer& owned_;
  std::vector<RankCall> calls_;
  std::vector<Tensor> before_;
};

// Every other case, from the first or the second on.
void expect_every_other_format_moves(size_t from) {
  const ExpertSlots next = slots_with({1, 2, 9, 5});
  const std::vector<MovingCase> cases = testing::moving_cases();
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    for (size_t i = from; i < cases.size(); i += 2) {
      const MovingCase& it = cases[i];
      const auto owned = experts_of_rank(it.spec, rank, comm, kOptions);
      const auto made = experts_of_rank(it.spec, rank, comm, kOptions, split_of(next));
      const Outputs outputs(*owned, it.spec, rank, it.rows);
      owned->layer.update_placement(next, {.piece_bytes = 16384});
      EXPECT_EQ(by_rank(owned->layer.slots()), by_rank(next)) << it.name;
      EXPECT_EQ(Refit::content_hash(owned->layer), Refit::content_hash(made->layer)) << it.name;
      EXPECT_TRUE(outputs.are_the_same()) << it.name << ", sent, rank " << rank;
      owned->layer.update_placement(slots_with({0, 1, 2, 3, 4}), {.source = owned->source.get()});
      EXPECT_TRUE(outputs.are_the_same()) << it.name << ", read, rank " << rank;
      comm.barrier("done");
    }
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

TEST_F(CudaMovingExperts, EveryFormat_HasTheBytesOfALayerMadeThere_AndKeepsItsBits) {
  expect_every_other_format_moves(0);
}
TEST_F(CudaMovingExperts, EveryOtherFormat_HasTheBytesOfALayerMadeThere_AndKeepsItsBits) {
  expect_every_other_format_moves(1);
}

// Sums of several experts depend on the placement alone, whichever way it came about.
TEST_F(CudaMovingExperts, SumsOfSeveralExperts_AreThoseOfALayerMadeThere) {
  MoeSpec spec = testing::make_spec(kMovingExperts, 3, 264, 256, DType::kBF16);
  spec.has_bias = true;
  const ExpertSlots next = slots_with({9, 1, 7, 3, 5, 0});
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm, kOptions);
    const auto made = experts_of_rank(spec, rank, comm, kOptions, split_of(next));
    const RankCall call = call_of(spec, rank, 33 + 20 * rank, DType::kBF16);
    owned->layer.update_placement(next);
    const Tensor out = run_call(*owned, call, DType::kF32);
    EXPECT_TRUE(same_bits(out, run_call(*made, call, DType::kF32)));
    EXPECT_LE(testing::worst_error(*owned, call.hidden, call.routing, out), kBar);
    comm.barrier("done");
  });
}

// Experts that change places in a circle pass through a temporary place.
TEST_F(CudaMovingExperts, WithoutSparePlaces_TheyChangeSides) {
  const MoeSpec spec = one_choice();
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm);
    const Outputs outputs(*owned, spec, rank, DType::kBF16);
    for (const ExpertSlots& slots : {slots_with({5, 6, 7, 8, 9}), slots_with({9, 0, 1, 2, 5})}) {
      owned->layer.update_placement(slots);
      EXPECT_EQ(by_rank(owned->layer.slots()), by_rank(slots));
      EXPECT_TRUE(outputs.are_the_same());
      const auto made = experts_of_rank(spec, rank, comm, {.max_tokens = 128}, split_of(slots));
      EXPECT_EQ(Refit::content_hash(owned->layer), Refit::content_hash(made->layer));
    }
    comm.barrier("done");
  });
}

TEST_F(CudaMovingExperts, Replicas_BecomeThoseOfOtherExperts) {
  const MoeSpec spec = one_choice();
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm, kOptions, {.num_redundant_experts = 2});
    const Outputs outputs(*owned, spec, rank, DType::kBF16);
    testing::SlotDealer dealer(kMovingExperts, {7, 7}, 2, 3);
    for (int step = 0; step < 5; ++step) {
      const ExpertSlots slots = dealer.deal();
      owned->layer.update_placement(slots);
      EXPECT_EQ(by_rank(owned->layer.slots()), by_rank(slots));
      EXPECT_TRUE(outputs.are_the_same()) << step;
    }
    comm.barrier("done");
  });
}

// All experts go to one rank but one, and the other way: the router chooses that one never, or
// always.
TEST_F(CudaMovingExperts, AnIdleExpertAndABusyOne_AreNoOtherCase) {
  const MoeSpec spec = one_choice();
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm, {.max_tokens = 128, .spare_experts = 5});
    for (const int32_t chosen : {9, 0}) {
      RankCall call = call_of(spec, rank, 40, DType::kBF16);
      std::ranges::fill(std::span(call.routing.ids.as<int32_t>(), 40), chosen);
      const Tensor before = run_call(*owned, call, DType::kF32);
      owned->layer.update_placement(slots_with({0, 1, 2, 3, 4, 5, 6, 7, 8}));
      EXPECT_TRUE(same_bits(run_call(*owned, call, DType::kF32), before)) << chosen;
      owned->layer.update_placement(slots_with({0, 1, 2, 3, 4}));
      EXPECT_TRUE(same_bits(run_call(*owned, call, DType::kF32), before)) << chosen;
    }
    comm.barrier("done");
  });
}

TEST_F(CudaMovingExperts, AGraphOfBefore_ReadsTheNewPlaces) {
  const MoeSpec spec = one_choice();
  const TokensOfRanks tokens = {20, 9};
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm, kOptions);
    const RankCall call = call_of(spec, rank, tokens[static_cast<size_t>(rank)], DType::kBF16);
    const Tensor before = run_call(*owned, call, DType::kF32);
    DeviceForward forward(*owned, call.hidden.view(), DType::kF32);
    forward.route_by(call.routing.ids, call.routing.weights);
    forward.args.rank_tokens = tokens;
    CUstream_st* const stream = to_cuda(owned->queue.stream());
    {
      const cuda::OwnedGraph graph = cuda::capture(stream, [&] { forward.enqueue(); });
      for (const ExpertSlots& slots : {slots_with({1, 2, 9, 5}), slots_with({6, 7, 8, 9})}) {
        owned->layer.update_placement(slots);
        owned->queue.fill(forward.args.out, 0xFF);
        cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
        owned->queue.synchronize();
        EXPECT_TRUE(same_bits(forward.out(), before));
      }
    }
    comm.check("done");
    comm.barrier("done");
  });
}

// Other changes of weights find experts where they lie now.
TEST_F(CudaMovingExperts, ReloadsAndRefits_FindThemWhereTheyLie) {
  const MoeSpec spec =
      one_choice(DType::kI4, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32});
  const ExpertSlots next = slots_with({1, 2, 9, 5});
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm, kOptions);
    const Outputs outputs(*owned, spec, rank, DType::kBF16);
    owned->layer.update_placement(next);
    const uint64_t moved = Refit::content_hash(owned->layer);
    for (const ReloadMode mode : {ReloadMode::kInPlace, ReloadMode::kStaged}) {
      owned->layer.reload(*owned->source, mode);
      EXPECT_EQ(Refit::content_hash(owned->layer), moved);
      EXPECT_TRUE(outputs.are_the_same());
    }
    const auto other = make_synthetic_source(spec, 12);
    for (const WeightSource* source : {other.get(), owned->source.get()}) {
      Refit refit(owned->layer);
      refit.stage(*source);
      refit.commit();
    }
    EXPECT_EQ(Refit::content_hash(owned->layer), moved);
    EXPECT_TRUE(outputs.are_the_same());
    owned->layer.update_placement(slots_with({0, 1, 2, 3, 4}));
    EXPECT_TRUE(outputs.are_the_same());
    comm.barrier("done");
  });
}

TEST_F(CudaMovingExperts, OtherWeights_AreAMismatchOnEveryRank_AndTheOldPlaceServes) {
  const MoeSpec spec = one_choice();
  const auto other = make_synthetic_source(spec, 12);
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm, kOptions);
    const Outputs outputs(*owned, spec, rank, DType::kBF16);
    const ExpertSlots next = slots_with({1, 2, 9, 5});
    const auto move = [&](const WeightSource* source) {
      return code_of([&] { owned->layer.update_placement(next, {.source = source}); });
    };
    EXPECT_EQ(move(other.get()), ErrorCode::kCommMismatch);
    EXPECT_EQ(owned->layer.placement_epoch(), 0U);
    EXPECT_TRUE(outputs.are_the_same());
    EXPECT_EQ(move(owned->source.get()), ErrorCode{0});
    EXPECT_TRUE(outputs.are_the_same());
    comm.barrier("done");
  });
}

TEST_F(CudaMovingExperts, RanksThatAskForOtherSlots_LearnIt_AndTheOldPlaceServes) {
  const MoeSpec spec = one_choice();
  on_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    const auto owned = experts_of_rank(spec, rank, comm, kOptions);
    const Outputs outputs(*owned, spec, rank, DType::kBF16);
    const ExpertSlots next = rank == 0 ? slots_with({1, 2, 9, 5}) : slots_with({1, 2, 8, 5});
    EXPECT_EQ(code_of([&] { owned->layer.update_placement(next); }), ErrorCode::kCommMismatch);
    EXPECT_EQ(owned->layer.placement_epoch(), 0U);
    EXPECT_TRUE(outputs.are_the_same());
    comm.barrier("done");
  });
}

// Sums that the caller adds up: ranks share no communicator of the layer, and one GPU may have
// both.
class CudaMovingParts : public testing::CudaLayerTest {};

TEST_F(CudaMovingParts, ByWayOfTheHost_TheySendAndRead) {
  const ExpertSlots next = slots_with({1, 2, 9, 5});
  const ExpertSlots first = slots_with({0, 1, 2, 3, 4});
  for (const MovingCase& it : testing::moving_cases()) {
    auto group = make_local_group({.num_ranks = 2, .timeout = 20s});
    const auto outcomes = testing::run_ranks(std::move(group), [&](int32_t rank,
                                                                   Communicator& comm) {
      const auto part_of = [&](ParallelSpec split) {
        split.ep_size = 2;
        split.ep_rank = rank;
        split.reduce = Reduce::kPartial;
        return split;
      };
      DeviceLayer owned(it.spec, kOptions, part_of({}));
      DeviceLayer made(it.spec, kOptions, part_of(split_of(next)));
      const RankCall call = call_of(it.spec, 0, 40, it.rows);
      const Tensor before = run_call(owned, call, DType::kF32);
      const uint64_t at_first = Refit::content_hash(owned.layer);
      owned.layer.update_placement(next, {.communicator = &comm});
      EXPECT_EQ(Refit::content_hash(owned.layer), Refit::content_hash(made.layer)) << it.name;
      EXPECT_TRUE(same_bits(run_call(owned, call, DType::kF32), run_call(made, call, DType::kF32)))
          << it.name;
      // Alone, from the source.
      owned.layer.update_placement(first, {.source = owned.source.get()});
      EXPECT_EQ(Refit::content_hash(owned.layer), at_first) << it.name;
      EXPECT_TRUE(same_bits(run_call(owned, call, DType::kF32), before)) << it.name;
    });
    EXPECT_EQ(first_failure(outcomes), "") << it.name;
  }
}

// A layer of one rank, where no sum depends on the placement.
class OneRank {
 public:
  explicit OneRank(int32_t max_adapter_rank = 0)
      : owned_(spec_, {.max_tokens = 64, .spare_experts = 2, .max_adapter_rank = max_adapter_rank},
               {.num_redundant_experts = 2}) {}

  DeviceLayer& owned() { return owned_; }
  MoeLayer& layer() { return owned_.layer; }
  const MoeSpec& spec() const { return spec_; }
  Tensor run(int32_t adapter = kNoAdapter) {
    DeviceForward forward(owned_, call_.hidden.view(), DType::kF32);
    forward.route_by(call_.routing.ids, call_.routing.weights);
    forward.args.adapter = adapter;
    forward.enqueue();
    return forward.out();
  }
  // The replicas are of these two.
  static ExpertSlots slots(int32_t first, int32_t second) {
    ExpertSlots slots = slots_with({});
    slots.logical_of.insert(slots.logical_of.end(), {first, second});
    slots.first_of = {0, static_cast<int32_t>(slots.logical_of.size())};
    return slots;
  }

 private:
  MoeSpec spec_ = testing::make_spec(kMovingExperts, 3, 264, 256, DType::kBF16);
  DeviceLayer owned_;
  RankCall call_ = call_of(spec_, 0, 50, DType::kBF16);
};

TEST_F(CudaMovingParts, OneRank_ChangesItsReplicas_AtOnceAndInTheBackground) {
  OneRank one;
  const Tensor before = one.run();
  one.layer().update_placement(OneRank::slots(7, 3));
  EXPECT_EQ(by_rank(one.layer().slots()), by_rank(OneRank::slots(7, 3)));
  EXPECT_TRUE(same_bits(one.run(), before));
  const auto alone = make_local_group({.num_ranks = 1});
  Migration migration(one.layer(), OneRank::slots(9, 9), {.communicator = alone[0].get()});
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(same_bits(one.run(), before)) << i;
  migration.finish();
  EXPECT_EQ(by_rank(one.layer().slots()), by_rank(OneRank::slots(9, 9)));
  EXPECT_TRUE(same_bits(one.run(), before));
}

// They stay where they are: whoever moves experts removes them before and adds them again.
TEST_F(CudaMovingParts, Adapters_AreRefused_AndFindThePlacesOfAfterwards) {
  OneRank one(8);
  const LoraAdapter adapter = testing::random_adapter(one.spec(), {.rank = 8}, 5);
  AdapterId id = one.layer().add_adapter(adapter);
  const Tensor before = one.run(id);
  const ExpertSlots next = OneRank::slots(7, 3);
  EXPECT_EQ(code_of([&] { one.layer().update_placement(next); }), ErrorCode::kUnsupported);
  one.layer().remove_adapter(id);
  EXPECT_FALSE(same_bits(one.run(), before));
  one.layer().update_placement(next);
  id = one.layer().add_adapter(adapter);
  EXPECT_TRUE(same_bits(one.run(id), before));
}

TEST_F(CudaMovingParts, WhatCannotMove_SaysWhy) {
  DeviceLayer whole(one_choice());
  EXPECT_EQ(code_of([&] { whole.layer.update_placement(whole.layer.slots()); }),
            ErrorCode::kUnsupported);
  ParallelSpec parts{.ep_size = 2, .reduce = Reduce::kPartial};
  DeviceLayer part(one_choice(), kOptions, parts);
  EXPECT_EQ(code_of([&] {
              part.layer.update_placement(slots_with({1, 2}));
            }),
            ErrorCode::kInvalidArgument)
      << "neither a communicator nor a source";
  EXPECT_EQ(code_of([&] {
              part.layer.update_placement(slots_with({0, 1, 2, 3, 4, 5, 6}),
                                          {.source = part.source.get()});
            }),
            ErrorCode::kInvalidArgument)
      << "one place of each rank stays free";
}

}  // namespace
}  // namespace conclave
