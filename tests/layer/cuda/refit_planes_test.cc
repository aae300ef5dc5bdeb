// Refits of a device's memory without a device: whatever part changes in whatever mode, the memory
// then says what that of a layer does which was made from the merged weights.
#include "layer/cuda/content_hash.h"
#include "layer/cuda/cuda_refit.h"
#include "layer/cuda/h200_plan.h"
#include "layer/cuda/refit_cases.h"
#include "support/role_sources.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::kRefitModes;
using testing::MergedSource;
using testing::NamedSource;
using testing::RefitCase;

class HostMemory final : public DeviceAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment, Stream) override {
    if (refuses) return nullptr;
    void* const data =
        std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    requests_.emplace_back(static_cast<const std::byte*>(data), bytes);
    return data;
  }
  void deallocate(void* data, size_t, Stream) noexcept override { std::free(data); }
  // In order.
  const std::vector<std::span<const std::byte>>& requests() const { return requests_; }

  bool refuses = false;

 private:
  std::vector<std::span<const std::byte>> requests_;
};

// The weights of one rank as they lie on its device, and a refit of them.
class Held {
 public:
  Held(const CudaPlan& plan, const WeightSource& source) : plan_(plan) {
    weights_ = allocate_cuda_weights(memory_, plan_, source, {});
    fill_cuda_weights(context_, plan_, source, plan_.part.local_experts, {}, weights_);
    num_own_ = memory_.requests().size();
  }

  void refuse_memory(bool refuses) { memory_.refuses = refuses; }
  // Whether every byte is the same: no list of planes says where to look.
  bool has_bytes_of(const Held& other) const {
    for (size_t i = 0; i < num_own_; ++i) {
      if (!std::ranges::equal(memory_.requests()[i], other.memory_.requests().at(i))) return false;
    }
    return num_own_ == other.num_own_;
  }
  // Scales of which bytes say the same in either of two forms.
  bool has_forms() const { return weights_.routed.gate_up.form.has_value(); }

  uint64_t hash() const {
    return hash_cuda_weights(plan_, weights_, plan_.part.local_experts, fence_);
  }
  bool has_only_short_scales() const {
    bool all = true;
    for (const CudaMatrixMemory* memory : {&weights_.routed.gate_up, &weights_.routed.down}) {
      if (!memory->short_scales.empty()) all = all && *memory->short_scales.as<int32_t>() == 1;
    }
    return all;
  }

  std::unique_ptr<CudaRefit> begin(RefitMode mode, const RefitUnits& scope) {
    return std::make_unique<CudaRefit>(RefittedWeights{.context = context_,
                                                       .allocator = memory_,
                                                       .plan = plan_,
                                                       .live = weights_,
                                                       .spare = spare_,
                                                       .fence = fence_},
                                       RefitRequest{.mode = mode,
                                                    .scope = scope,
                                                    .gate = gate_,
                                                    .keeps_memory = true,
                                                    .places = plan_.part.local_experts});
  }
  void stage(CudaRefit& refit, const WeightSource& source, const RefitUnits& units) {
    const std::function<void()> nothing = [] {};
    refit.stage({.source = source, .units = units, .before_overwriting = nothing});
  }
  static void commit(CudaRefit& refit) {
    refit.prepare();
    refit.publish();
    refit.settle();
  }
  void refit(RefitMode mode, const RefitScope& scope, const WeightSource& source) {
    const RefitUnits units = units_of(plan_.spec, scope);
    const auto refit = begin(mode, units);
    stage(*refit, source, units);
    commit(*refit);
  }

 private:
  HostMemory memory_;
  Context context_{{.num_threads = 3}};
  const CudaPlan& plan_;
  CudaWeights weights_;
  size_t num_own_ = 0;
  RefitMemory spare_;
  WeightFence fence_;
  ForwardGate gate_;
};

std::vector<RefitScope> scopes_of(const WeightSource& source) {
  std::vector<RefitScope> scopes = {{},
                                    {.experts = {4}},
                                    {.experts = {0, 1, 3, 5}},
                                    {.tensors = {weights::kDown}},
                                    {.experts = {2, 5}, .tensors = {weights::kUp}}};
  for (const WeightId id : testing::roles_of(source)) {
    const bool is_matrix = id.plane() == WeightPlane::kWeights;
    if (!id.mlp() || (is_matrix && id.mlp() != WeightMlp::kRouted)) {
      scopes.push_back({.tensors = {id}});
    }
  }
  return scopes;
}

std::vector<ParallelSpec> splits() {
  return {{}, {.tp_size = 2, .tp_rank = 1, .reduce = Reduce::kPartial}};
}

TEST(CudaRefitPlanes, EveryScopeAndMode_SaysWhatTheMergedLayerSays) {
  for (const RefitCase& each : testing::refit_cases()) {
    for (const ParallelSpec& split : splits()) {
      SCOPED_TRACE(each.name + ", rank " + std::to_string(split.tp_rank) + " of " +
                   std::to_string(split.tp_size));
      const CudaPlan plan = testing::plan(each.spec, {.max_tokens = 64}, split);
      const auto first = make_synthetic_source(each.spec, 3);
      const auto second = make_synthetic_source(each.spec, 4);
      Held all(plan, *first);
      const uint64_t before = all.hash();
      std::vector<RefitScope> scopes = scopes_of(*first);
      if (split.tp_size > 1) scopes.resize(3);
      for (const RefitScope& scope : scopes) {
        const MergedSource merged(each.spec, *first, *second, scope);
        const NamedSource named(each.spec, merged, scope);
        const Held fresh(plan, merged);
        const uint64_t expected = fresh.hash();
        EXPECT_NE(expected, before);
        for (const RefitMode mode : kRefitModes) {
          Held held(plan, *first);
          held.refit(mode, scope, named);
          EXPECT_EQ(held.hash(), expected);
          EXPECT_TRUE(fresh.has_forms() || held.has_bytes_of(fresh));
          held.refit(mode, scope, *first);
          EXPECT_EQ(held.hash(), before);
        }
        // The same memory again and again, which refits have kept.
        all.refit(RefitMode::kStaged, scope, named);
        EXPECT_EQ(all.hash(), expected);
        all.refit(RefitMode::kStaged, {}, *first);
        EXPECT_EQ(all.hash(), before);
      }
    }
  }
}

// Scales of some experts are other numbers than bf16 or a form of bytes has.
class OddScales final : public WeightSource {
 public:
  // Those of such an expert are odd where `every` divides their number.
  OddScales(const WeightSource& inner, std::set<int64_t> experts, size_t every = 1)
      : inner_(inner), experts_(std::move(experts)), every_(every) {}
  WeightInfo describe(WeightId id) const override {
    WeightInfo info = inner_.describe(id);
    if (is_scale(id) && info.dtype != DType::kF8E4M3) info.dtype = DType::kF32;
    return info;
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (!is_scale(id)) return inner_.read(id, expert, block, destination);
    const bool is_odd = experts_.contains(expert);
    if (describe(id).dtype == DType::kF8E4M3) {
      inner_.read(id, expert, block, destination);
      if (is_odd) destination.front() = std::byte{0};
      return;
    }
    for (size_t at = 0; at < destination.size(); at += sizeof(float)) {
      const bool is_other = is_odd && at / 4 % every_ == 0;
      const float scale = (is_other ? 1.001F : 1.0F) / static_cast<float>(32 << (at / 4 % 3));
      std::memcpy(destination.data() + at, &scale, sizeof(scale));
    }
  }

 private:
  static bool is_scale(WeightId id) {
    return id.mlp() == WeightMlp::kRouted && id.plane() == WeightPlane::kScale;
  }

  const WeightSource& inner_;
  std::set<int64_t> experts_;
  size_t every_;
};

MoeSpec spec_named(const std::string& name) {
  for (const RefitCase& each : testing::refit_cases()) {
    if (each.name == name) return each.spec;
  }
  throw Error(ErrorCode::kInternal, {.what = "no such case", .found = name});
}

TEST(CudaRefitPlanes, ShortScalesOfAllExperts_AreFoundAgainInParts) {
  const MoeSpec spec = spec_named("int4 in groups");
  const CudaPlan plan = testing::plan(spec, {.max_tokens = 64});
  const auto source = make_synthetic_source(spec, 3);
  const OddScales even(*source, {});
  const OddScales odd(*source, {2, 4});
  for (const RefitMode mode : kRefitModes) {
    Held held(plan, even);
    const uint64_t hash = held.hash();
    EXPECT_TRUE(held.has_only_short_scales());
    held.refit(mode, {.experts = {4}}, odd);
    EXPECT_FALSE(held.has_only_short_scales());
    held.refit(mode, {.experts = {2}}, odd);
    held.refit(mode, {.experts = {4}}, even);
    EXPECT_FALSE(held.has_only_short_scales());
    held.refit(mode, {.experts = {2, 3}}, even);
    EXPECT_TRUE(held.has_only_short_scales());
    EXPECT_EQ(held.hash(), hash);
  }
}

// A scale of 0 has no byte where the others lie near each other.
TEST(CudaRefitPlanes, ScalesThatDoNotFitTheForm_ComeWithAllExperts) {
  const MoeSpec spec = spec_named("codes with scales of e4m3");
  const CudaPlan plan = testing::plan(spec, {.max_tokens = 64});
  const auto source = make_synthetic_source(spec, 3);
  const OddScales even(*source, {});
  const OddScales odd(*source, {2});
  const uint64_t of_odd = Held(plan, odd).hash();
  for (const RefitMode mode : {RefitMode::kStaged, RefitMode::kInPlace}) {
    Held held(plan, even);
    const uint64_t hash = held.hash();
    EXPECT_EQ(code_of([&] {
                held.refit(mode, {.experts = {2, 3}}, odd);
              }),
              ErrorCode::kTensorValue);
    if (mode == RefitMode::kStaged) {
      EXPECT_EQ(held.hash(), hash);
    }
    held.refit(mode, {}, odd);
    EXPECT_EQ(held.hash(), of_odd);
    // The form stays, and says the same.
    held.refit(mode, {.experts = {2}}, even);
    EXPECT_EQ(held.hash(), hash);
    held.refit(mode, {.experts = {2}}, odd);
    EXPECT_EQ(held.hash(), of_odd);
    held.refit(mode, {}, even);
    EXPECT_EQ(held.hash(), hash);
  }
}

// 1.001 is no step of the numbers beside it.
TEST(CudaRefitPlanes, NumbersThatAreNoSteps_AreRefusedAndStagedOnesChangeNothing) {
  for (const char* name :
       {"codes with scales and offsets in steps", "codes with scales in steps"}) {
    SCOPED_TRACE(name);
    const MoeSpec spec = spec_named(name);
    const CudaPlan plan = testing::plan(spec, {.max_tokens = 64});
    const auto source = make_synthetic_source(spec, 3);
    const OddScales even(*source, {});
    const OddScales odd(*source, {2}, 7);
    for (const RefitMode mode : kRefitModes) {
      Held held(plan, even);
      const uint64_t hash = held.hash();
      EXPECT_EQ(code_of([&] {
                  held.refit(mode, {.experts = {1, 2}}, odd);
                }),
                ErrorCode::kTensorValue);
      if (mode == RefitMode::kInPlace) held.refit(mode, {.experts = {1, 2}}, even);
      EXPECT_EQ(held.hash(), hash);
    }
  }
}

// Columns that have an order lie where it says, which changes with the experts.
TEST(CudaRefitPlanes, ExpertsWithAnOrder_ChangeWhole) {
  MoeSpec spec = testing::coded_layer(
      DType::kI4,
      {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32, .has_column_order = true},
      128, 64);
  const auto first = make_synthetic_source(spec, 3);
  const auto second = make_synthetic_source(spec, 4);
  const LayerOptions options{.max_tokens = 64};
  const ParallelSpec whole;
  const cuda::DeviceInfo device = testing::h200();
  CudaPlanRequest request{.spec = spec, .options = options, .parallel = whole, .device = device};
  const CudaPlan assumed = plan_cuda_layer(request);
  request.orders = read_orders(assumed, *first, {});
  const CudaPlan plan = plan_cuda_layer(request);
  const RefitScope scope{.experts = {1, 4, 5}};
  const MergedSource merged(spec, *first, *second, scope);
  const uint64_t expected = Held(plan, merged).hash();
  for (const RefitMode mode : kRefitModes) {
    Held held(plan, *first);
    held.refit(mode, scope, NamedSource(spec, merged, scope));
    EXPECT_EQ(held.hash(), expected);
    const RefitScope half{.experts = {1}, .tensors = {weights::kDown}};
    EXPECT_EQ(code_of([&] { held.refit(mode, half, *first); }), ErrorCode::kUnsupported);
    const RefitUnits units = units_of(spec, scope);
    const auto refit = held.begin(mode, units);
    EXPECT_EQ(code_of([&] { held.stage(*refit, *first, units_of(spec, half)); }),
              ErrorCode::kUnsupported);
    EXPECT_EQ(held.hash(), expected);
  }
}

// Such a refit has taken the memory that those before it kept.
TEST(CudaRefitPlanes, AfterOneThatIsRefused_TheNextHasMemoryAgain) {
  const MoeSpec spec = spec_named("int4 in groups");
  const CudaPlan plan = testing::plan(spec, {.max_tokens = 64});
  const auto source = make_synthetic_source(spec, 3);
  Held held(plan, *source);
  const uint64_t hash = held.hash();
  held.refit(RefitMode::kStaged, {}, *source);
  held.refuse_memory(true);
  EXPECT_EQ(code_of([&] { held.refit(RefitMode::kStaged, {.experts = {1}}, *source); }),
            ErrorCode::kOutOfMemory);
  held.refuse_memory(false);
  for (const RefitMode mode : kRefitModes) {
    held.refit(mode, {.experts = {1, 2}}, *source);
    EXPECT_EQ(held.hash(), hash);
  }
}

}  // namespace
}  // namespace conclave
