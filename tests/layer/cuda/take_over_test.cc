// Layers that go to other ranks, without a device: what a rank copies of its own memory, and what
// it reads, is what a layer has that was made there.
#include "layer/cuda/take_over.h"

#include "layer/cuda/content_hash.h"
#include "layer/cuda/h200_plan.h"
#include "layer/cuda/on_devices.h"
#include "layer/cuda/refit_cases.h"

#include "conclave/balance.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::OnDevices;
using testing::RefitCase;

constexpr int64_t kMaxTokens = 64;

class HostMemory final : public DeviceAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment, Stream) override {
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  void deallocate(void* data, size_t, Stream) noexcept override { std::free(data); }
};

// Counts the reads of matrices of routed experts.
class CountedSource final : public WeightSource {
 public:
  explicit CountedSource(const WeightSource& inner) : inner_(inner) {}
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (id == weights::kDown) reads_.fetch_or(uint64_t{1} << expert);
    inner_.read(id, expert, block, destination);
  }
  // A bit for each expert.
  uint64_t experts() const { return reads_; }

 private:
  const WeightSource& inner_;
  mutable std::atomic<uint64_t> reads_ = 0;
};

// A rank's weights as they lie on its device.
struct OnRank {
  OnRank(HostMemory& memory, const Context& context, const CudaPlan& on, const WeightSource& source)
      : plan(on), weights(allocate_cuda_weights(memory, on, source, {})) {
    fill_cuda_weights(context, on, source, on.part.local_experts, {}, weights);
  }
  OnRank(const CudaPlan& on, CudaWeights taken) : plan(on), weights(std::move(taken)) {}

  uint64_t hash() const { return hash_cuda_weights(plan, weights, plan.part.local_experts, fence); }
  std::vector<int32_t> map() const {
    const DeviceMemory& memory = weights.local_expert;
    std::vector<int32_t> places(memory.bytes() / sizeof(int32_t));
    if (!places.empty()) std::memcpy(places.data(), memory.as(), memory.bytes());
    return places;
  }

  const CudaPlan& plan;
  CudaWeights weights;
  WeightFence fence;
};

CudaPlan plan_on(const MoeSpec& spec, const ParallelSpec& parallel, Communicator& ranks,
                 SharedForm shared, const std::optional<LayerOrders>& orders = {}) {
  const cuda::DeviceInfo device = testing::h200();
  const LayerOptions options{.max_tokens = kMaxTokens};
  return plan_cuda_layer({.spec = spec,
                          .options = options,
                          .parallel = parallel,
                          .device = device,
                          .shared = shared,
                          .orders = orders,
                          .communicator = &ranks});
}

// The split of so many ranks, with every expert on two of them if wanted.
ParallelSpec split_of(const MoeSpec& spec, int32_t ranks, int32_t rank, bool has_replicas) {
  const ParallelSpec plain{.ep_size = ranks, .ep_rank = rank};
  if (!has_replicas) return plain;
  const std::vector<double> load(static_cast<size_t>(spec.num_experts), 1.0);
  return with_slots(plain, balance_experts(load, {.rule = "surviving",
                                                  .num_ranks = ranks,
                                                  .num_redundant_experts =
                                                      static_cast<int32_t>(spec.num_experts)}));
}

struct Loss {
  int32_t ranks = 2;
  std::vector<int32_t> left;
  int32_t me = 0;  // among them
  bool has_replicas = false;
  SharedForm shared = SharedForm::kSeparate;  // afterwards
};

const std::vector<Loss>& losses() {
  static const std::vector<Loss> all = {
      {.ranks = 2, .left = {1}, .shared = SharedForm::kFused},
      {.ranks = 2, .left = {0}, .has_replicas = true},
      {.ranks = 3, .left = {0, 2}, .me = 1, .has_replicas = true},
      {.ranks = 4, .left = {0, 1, 3}, .me = 2},
      {.ranks = 3, .left = {0, 1, 2}, .me = 1},
  };
  return all;
}

class Taking {
 public:
  Taking(const MoeSpec& spec, const Loss& loss)
      : source(make_synthetic_source(spec, 3)),
        before_ranks_(old_rank(loss), loss.ranks),
        after_ranks_(loss.me, static_cast<int32_t>(loss.left.size())),
        before(plan_on(spec, split_of(spec, loss.ranks, old_rank(loss), loss.has_replicas),
                       before_ranks_, SharedForm::kFused)),
        after(plan_on(spec, without_ranks(spec.num_experts, before.parallel, loss.left, loss.me),
                      after_ranks_, loss.shared)),
        held(memory, context, before, *source) {}

  OnRank fresh() { return {memory, context, after, *source}; }
  OnRank taken(const WeightSource* from) {
    return {after, take_over_cuda_weights(context, memory, after, lent(), from, {})};
  }
  HeldCudaWeights lent() const {
    return {.plan = before, .weights = held.weights, .places = before.part.local_experts};
  }
  int64_t missing() const { return first_missing(after, lent()); }
  // A bit for each expert that the rank is to have and has not.
  uint64_t lacking() const {
    uint64_t bits = 0;
    for (const int32_t expert : after.part.local_experts) bits |= uint64_t{1} << expert;
    for (const int32_t expert : before.part.local_experts) bits &= ~(uint64_t{1} << expert);
    return bits;
  }

  HostMemory memory;
  Context context{{.num_threads = 1}};
  std::unique_ptr<WeightSource> source;

 private:
  static int32_t old_rank(const Loss& loss) { return loss.left[static_cast<size_t>(loss.me)]; }

  OnDevices before_ranks_;
  OnDevices after_ranks_;

 public:
  CudaPlan before;
  CudaPlan after;
  OnRank held;
};

std::string name_of(const RefitCase& each, const Loss& loss) {
  return each.name + ", " + std::to_string(loss.left.size()) + " of " + std::to_string(loss.ranks) +
         (loss.has_replicas ? " with replicas" : "");
}

// Where all is held the source is not asked, and may be gone.
TEST(CudaTakeOver, WhatIsCopiedAndRead_IsWhatALayerMadeThereHas) {
  for (const RefitCase& each : testing::refit_cases()) {
    for (const Loss& loss : losses()) {
      SCOPED_TRACE(name_of(each, loss));
      Taking taking(each.spec, loss);
      const OnRank fresh = taking.fresh();
      const uint64_t before = taking.held.hash();
      const CountedSource counted(*taking.source);
      const OnRank taken = taking.taken(&counted);
      EXPECT_EQ(taken.hash(), fresh.hash());
      EXPECT_EQ(taken.map(), fresh.map());
      const uint64_t lacking = taking.lacking();
      const bool reads_all = lacking != 0 && taking.held.weights.routed.gate_up.form.has_value();
      if (!reads_all) {
        EXPECT_EQ(counted.experts(), lacking);
      }
      if (lacking == 0) {
        EXPECT_EQ(taking.missing(), -1);
        const OnRank copied = taking.taken(nullptr);
        EXPECT_EQ(copied.hash(), fresh.hash());
        EXPECT_EQ(copied.map(), fresh.map());
      } else if (taking.after.fused.slots() == 0) {
        ASSERT_GE(taking.missing(), 0);
        ASSERT_LT(taking.missing(), each.spec.num_experts);
        EXPECT_NE(lacking >> taking.missing() & 1U, 0U) << taking.missing();
      }
      EXPECT_EQ(taking.held.hash(), before);
    }
  }
}

// The orders that were found when they were read hold for those that are kept.
TEST(CudaTakeOver, ExpertsWhoseColumnsHaveAnOrder_KeepIt) {
  const MoeSpec spec = testing::coded_layer(
      DType::kI4,
      {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32, .has_column_order = true},
      128, 64);
  const auto source = make_synthetic_source(spec, 3);
  HostMemory memory;
  const Context context({.num_threads = 1});
  ParallelSpec both = split_of(spec, 2, 0, true);
  both.reduce = Reduce::kPartial;
  const LayerOptions options{.max_tokens = kMaxTokens};
  const cuda::DeviceInfo device = testing::h200();
  CudaPlanRequest request{.spec = spec, .options = options, .parallel = both, .device = device};
  request.orders = read_orders(plan_cuda_layer(request), *source, {});
  const CudaPlan before = plan_cuda_layer(request);
  const ParallelSpec alone = without_ranks(spec.num_experts, both, std::array{0}, 0);
  const CudaPlan after = plan_cuda_layer({.spec = spec,
                                          .options = options,
                                          .parallel = alone,
                                          .device = device,
                                          .orders = before.orders});
  const OnRank held(memory, context, before, *source);
  const HeldCudaWeights lent{
      .plan = before, .weights = held.weights, .places = before.part.local_experts};
  EXPECT_EQ(first_missing(after, lent), -1);
  const OnRank taken(after, take_over_cuda_weights(context, memory, after, lent, nullptr, {}));
  EXPECT_EQ(taken.hash(), OnRank(memory, context, after, *source).hash());
}

// What is held of other columns, or lies where its source has it, serves nobody else.
TEST(CudaTakeOver, OtherSlices_AreReadAnew) {
  const MoeSpec spec = testing::refit_cases()[2].spec;
  const auto source = make_synthetic_source(spec, 3);
  HostMemory memory;
  const Context context({.num_threads = 1});
  const CudaPlan sliced = testing::plan(spec, {.max_tokens = kMaxTokens},
                                        {.tp_size = 2, .tp_rank = 1, .reduce = Reduce::kPartial});
  const CudaPlan whole = testing::plan(spec, {.max_tokens = kMaxTokens});
  const OnRank held(memory, context, sliced, *source);
  const HeldCudaWeights lent{
      .plan = sliced, .weights = held.weights, .places = sliced.part.local_experts};
  EXPECT_EQ(first_missing(whole, lent), spec.num_experts);
  const OnRank taken(whole, take_over_cuda_weights(context, memory, whole, lent, source.get(), {}));
  EXPECT_EQ(taken.hash(), OnRank(memory, context, whole, *source).hash());
}

// Without ranks that add up, one of them has what counts once.
TEST(CudaTakeOver, SharedExpertsOfARankThatIsGone_AreReadToo) {
  const MoeSpec spec = testing::refit_cases().front().spec;
  const auto source = make_synthetic_source(spec, 3);
  HostMemory memory;
  const Context context({.num_threads = 1});
  const ParallelSpec second{.ep_size = 2, .ep_rank = 1, .reduce = Reduce::kPartial};
  const CudaPlan before = testing::plan(spec, {.max_tokens = kMaxTokens}, second);
  const CudaPlan after = testing::plan(spec, {.max_tokens = kMaxTokens},
                                       without_ranks(spec.num_experts, second, std::array{1}, 0));
  ASSERT_FALSE(before.part.holds_dense);
  const OnRank held(memory, context, before, *source);
  const HeldCudaWeights lent{
      .plan = before, .weights = held.weights, .places = before.part.local_experts};
  EXPECT_EQ(first_missing(after, lent), spec.num_experts);
  const OnRank taken(after, take_over_cuda_weights(context, memory, after, lent, source.get(), {}));
  EXPECT_EQ(taken.hash(), OnRank(memory, context, after, *source).hash());
}

}  // namespace
}  // namespace conclave
