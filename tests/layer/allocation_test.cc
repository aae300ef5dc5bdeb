// M4, M6: forward allocates nothing after warm-up; a failing heap gives a typed error everywhere.

#include "routing/router.h"
#include "routing/routing_problem.h"
#include "support/allocation_counter.h"
#include "support/layer_fixture.h"
#include "support/sanitizers.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <fstream>
#include <new>
#include <random>
#include <string>
#include <thread>

namespace conclave {
namespace {

using testing::AllocationCounts;
using testing::arm_allocation_counter;
using testing::disarm_allocation_counter;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;
using testing::random_tensor;

MoeSpec spec_of() {
  MoeSpec spec = make_spec(8, 2, 48, 40, DType::kBF16);
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 24};
  return spec;
}

// The specs below together have every part of a layer.
MoeSpec mixed_spec() {
  MoeSpec spec = make_spec(8, 3, 48, 40, DType::kBF16);
  spec.shared = {.mode = SharedMode::kSoftmaxMix, .intermediate_size = 24, .has_bias = true};
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.num_zero_experts = 3;
  spec.output_scale = 1.5;
  spec.latent = {.size = 20, .has_norm = true};
  spec.residual = {.intermediate_size = 12};
  return spec;
}
MoeSpec slotted_spec() {
  MoeSpec spec = make_spec(8, 1, 48, 40, DType::kBF16);
  spec.activation.name = "relu2_no_mul";
  spec.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 24, .count = 2};
  return spec;
}
MoeSpec weighted_spec() {
  MoeSpec spec = make_spec(8, 2, 48, 40, DType::kF32);
  spec.weight_on = WeightOn::kInput;
  spec.shared = {.mode = SharedMode::kAverage, .intermediate_size = 24};
  return spec;
}

#if CONCLAVE_TEST_ASAN || CONCLAVE_TEST_TSAN
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

int64_t resident_pages() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0;
  int64_t resident = 0;
  statm >> total >> resident;
  return resident;
}

TEST(AllocationCounter, ItSees_WhatItShouldSee) {
  arm_allocation_counter();
  // These are called as functions, since a new-expression could be optimised away.
  ::operator delete(::operator new(8));
  EXPECT_GE(disarm_allocation_counter().heap, 1);
}

TEST(Forward, AfterWarmUp_AllocatesNothing) {
  const OwnedLayer owned = make_layer(spec_of(), {.max_tokens = 16});
  const int64_t largest = 40;
  const Tensor hidden = random_tensor(DType::kBF16, largest, 48, 1);
  Tensor out(DType::kBF16, {largest, 48});
  const auto forward = [&](int64_t tokens) {
    owned.layer.forward({.hidden = {hidden.as<std::byte>(), DType::kBF16, {tokens, 48}},
                         .out = {out.as<std::byte>(), DType::kBF16, {tokens, 48}}});
  };
  forward(largest);
  std::mt19937 random(3);
  const int64_t pages_before = resident_pages();
  arm_allocation_counter();
  for (int step = 0; step < 10000; ++step) forward(static_cast<int64_t>(random() % (largest + 1)));
  const AllocationCounts counts = disarm_allocation_counter();
  EXPECT_EQ(counts.heap, 0);
  EXPECT_EQ(counts.mappings, 0);
  // The kernel counts pages lazily, so 64 of them are allowed. A sanitizer's shadow grows by
  // itself.
  if (!kSanitized) {
    EXPECT_LE(resident_pages() - pages_before, 64);
  }
}

TEST(Forward, EveryRouter_AllocatesNothingAfterWarmUp) {
  for (const auto& row : routing::router_catalog().rows()) {
    MoeSpec spec = testing::spec_of_row(row.name);
    spec.hidden_size = 48;
    spec.intermediate_size = 40;
    spec.router.has_logit_bias = true;
    spec.router.input_norm.enabled = true;
    if (row.name == "topk") {
      spec.router.score = RouterScore::kSigmoid;
      spec.router.has_selection_bias = true;
      spec.router.num_groups = 4;
      spec.router.topk_groups = 2;
    }
    const OwnedLayer owned = make_layer(spec, {.max_tokens = 16});
    const Tensor hidden = random_tensor(DType::kBF16, 40, 48, 1);
    Tensor out(DType::kBF16, {40, 48});
    const std::vector<int32_t> token_ids(40, 7);
    const auto forward = [&] {
      owned.layer.forward(
          {.hidden = hidden.view(),
           .token_ids = {.data = token_ids.data(), .dtype = DType::kI32, .shape = {40}},
           .out = out.view()});
    };
    forward();
    arm_allocation_counter();
    for (int step = 0; step < 50; ++step) forward();
    EXPECT_EQ(disarm_allocation_counter().heap, 0) << row.name;
  }
}

TEST(Forward, WithEveryPart_AllocatesNothing) {
  for (const MoeSpec& spec : {mixed_spec(), slotted_spec(), weighted_spec()}) {
    const OwnedLayer owned = make_layer(spec, {.max_tokens = 16});
    const Tensor hidden = random_tensor(DType::kBF16, 40, 48, 1);
    const Tensor residual = random_tensor(DType::kF32, 40, 48, 2);
    Tensor out(DType::kBF16, {40, 48});
    Tensor shared(DType::kF32, {40, 48});
    Tensor ids(DType::kI32, {40, num_slots(spec)});
    Tensor mask(DType::kBool, {40});
    for (int i = 0; i < 40; ++i) mask.as<uint8_t>()[i] = i % 5 != 0;
    ForwardArgs args{.hidden = hidden.view(), .out = out.view()};
    ForwardArgs apart{.hidden = hidden.view(),
                      .padding_mask = mask.view(),
                      .out = out.view(),
                      .shared_out = shared.view(),
                      .captured_ids = ids.view()};
    if (spec.residual.intermediate_size != 0) apart.residual_input = residual.view();
    owned.layer.forward(args);
    owned.layer.forward(apart);
    arm_allocation_counter();
    for (int step = 0; step < 500; ++step) {
      owned.layer.forward(args);
      owned.layer.forward(apart);
    }
    const AllocationCounts counts = disarm_allocation_counter();
    EXPECT_EQ(counts.heap, 0);
    EXPECT_EQ(counts.mappings, 0);
  }
}

// Counts the heap calls of 200 forwards on two ranks that split the layer as `parallel` says.
int64_t heap_calls_over_ranks(ParallelSpec parallel) {
  auto group = make_local_group({.num_ranks = 2});
  std::vector<std::thread> threads;
  std::atomic<int> ready{0};
  std::atomic<int> finished{0};
  AllocationCounts counts;
  for (int32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank, parallel]() mutable {
      (parallel.tp_size > 1 ? parallel.tp_rank : parallel.ep_rank) = rank;
      Communicator& communicator = *group[static_cast<size_t>(rank)];
      const Context context(
          {.num_threads = 1, .communicator = &communicator, .tensor_communicator = &communicator});
      const auto source = make_synthetic_source(spec_of(), 1);
      const MoeLayer layer =
          MoeLayer::create(context, spec_of(), *source, {.max_tokens = 16}, parallel);
      const Tensor hidden = random_tensor(DType::kBF16, 16, 48, 1);
      Tensor out(DType::kBF16, {16, 48});
      const ForwardArgs args{.hidden = hidden.view(), .out = out.view()};
      for (int warm_up = 0; warm_up < 3; ++warm_up) layer.forward(args);
      ready.fetch_add(1);
      while (ready.load() < 2) std::this_thread::yield();
      communicator.barrier("armed");
      if (rank == 0) arm_allocation_counter();
      communicator.barrier("armed");
      for (int step = 0; step < 200; ++step) layer.forward(args);
      communicator.barrier("done");
      if (rank == 0) counts = disarm_allocation_counter();
      communicator.barrier("done");
      finished.fetch_add(1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(finished.load(), 2);
  return counts.heap;
}

TEST(Forward, OverRanks_AllocatesNothingAfterWarmUp) {
  EXPECT_EQ(heap_calls_over_ranks({.ep_size = 2}), 0);
  EXPECT_EQ(heap_calls_over_ranks({.ep_size = 2, .num_redundant_experts = 3}), 0);
  EXPECT_EQ(heap_calls_over_ranks({.tp_size = 2}), 0);
}

// Fails the n-th operator new for every n: create either works or throws Error(kOutOfMemory) or
// std::bad_alloc, and a later create works.
TEST(HeapFailure, EveryAllocationOfCreate_IsSurvived) {
  const MoeSpec spec = make_spec(3, 1, 16, 8, DType::kBF16);
  const Context context({.num_threads = 1});
  const auto source = make_synthetic_source(spec, 1);
  int64_t points = 0;
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 10000);
    bool typed = true;
    testing::fail_heap_allocation(n);
    try {
      const MoeLayer layer = MoeLayer::create(context, spec, *source);
    } catch (const Error& error) {
      typed = error.code() == ErrorCode::kOutOfMemory;
    } catch (const std::bad_alloc&) {
      // The standard containers throw the standard's own type.
    }
    const bool failed = testing::heap_allocation_failed();
    testing::fail_heap_allocation(-1);
    EXPECT_TRUE(typed) << "allocation " << n;
    if (!failed) break;
    ++points;
  }
  EXPECT_GT(points, 10);
  EXPECT_NO_THROW(MoeLayer::create(context, spec, *source));
}

}  // namespace
}  // namespace conclave
