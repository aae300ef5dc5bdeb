// Tests layers that read their experts where the source has them (WeightUse::kInPlace): bits,
// parts, slices, what is packed all the same and why, and reload.

#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_spec;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;
using testing::usable_isas;

const LayerOptions kInPlace{.max_tokens = 64, .weights = WeightUse::kInPlace};
const LayerOptions kPacked{.max_tokens = 64};

// The weights of another source, each matrix in memory of its own: rows `gap` elements apart, the
// first one at an odd multiple of the element's size.
class MemorySource final : public WeightSource {
 public:
  MemorySource(const WeightSource& from, int64_t gap) : from_(from), gap_(gap) {
    for (const WeightId id : weights::kAll) {
      const WeightInfo info = from.describe(id);
      for (int64_t expert = 0; expert < info.count; ++expert) copy(id, info, expert);
    }
  }
  WeightInfo describe(WeightId id) const override { return from_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    from_.read(id, expert, block, destination);
  }
  ConstTensorView view(WeightId id, int64_t expert) const override {
    if (id == hidden_id && expert == hidden_expert) return {};
    const auto found = matrices_.find({id.index(), expert});
    if (found == matrices_.end()) return {};
    const WeightInfo info = describe(id);
    return {.data = found->second.data() + byte_size(info.dtype),
            .dtype = info.dtype,
            .shape = {info.rows, info.cols},
            .row_stride = info.cols + gap_};
  }

  // A matrix without a view.
  WeightId hidden_id = weights::kRouter;
  int64_t hidden_expert = -1;

 private:
  void copy(WeightId id, const WeightInfo& info, int64_t expert) {
    const auto size = static_cast<size_t>(byte_size(info.dtype));
    const auto stride = static_cast<size_t>(info.cols + gap_) * size;
    std::vector<std::byte> bytes(static_cast<size_t>(info.rows) * stride + size);
    for (int64_t row = 0; row < info.rows; ++row) {
      from_.read(id, expert, {row, row + 1, 0, info.cols},
                 {bytes.data() + size + static_cast<size_t>(row) * stride,
                  static_cast<size_t>(info.cols) * size});
    }
    matrices_[{id.index(), expert}] = std::move(bytes);
  }

  const WeightSource& from_;
  int64_t gap_;
  std::map<std::pair<size_t, int64_t>, std::vector<std::byte>> matrices_;
};

// Sizes that no panel, tile or vector divides, and every part that a layer has.
MoeSpec every_part(DType dtype) {
  MoeSpec spec = make_spec(5, 2, 83, 45, dtype);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 37, .has_bias = true};
  spec.has_bias = true;
  spec.residual = {.intermediate_size = 19};
  return spec;
}

const PlanRow* weights_row(const Plan& plan, const std::string& name) {
  const auto found = std::ranges::find_if(
      plan.rows, [&](const PlanRow& row) { return row.table == "weights" && row.name == name; });
  return found == plan.rows.end() ? nullptr : &*found;
}

class InPlace : public ::testing::TestWithParam<std::tuple<DType, std::string>> {};

TEST_P(InPlace, EveryPart_HasTheBitsOfPackedWeights) {
  const auto& [dtype, isa] = GetParam();
  const MoeSpec spec = every_part(dtype);
  const auto source = make_synthetic_source(spec, 7);
  const Context context({.num_threads = 3, .isa = isa});
  const MoeLayer packed = MoeLayer::create(context, spec, *source, kPacked);
  for (const int64_t gap : {0, 5}) {
    const MemorySource memory(*source, gap);
    const MoeLayer layer = MoeLayer::create(context, spec, memory, kInPlace);
    EXPECT_EQ(layer.plan().packed_bytes, 0U);
    const int64_t elements = 3 * (5 * 83 * 45 + 83 * 37 + 83 * 19);
    EXPECT_EQ(layer.plan().in_place_bytes, static_cast<size_t>(elements * byte_size(dtype)));
    for (const int64_t tokens : {1, 2, 7, 64}) {
      const Tensor hidden = random_tensor(DType::kF32, tokens, 83, 3);
      EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kF32).out,
                            run_layer(packed, hidden.view(), DType::kF32).out))
          << tokens << " tokens, gap " << gap;
    }
  }
}

// Nothing is packed that could be copied.
TEST_P(InPlace, LayerOnOtherRanks_NeedsItsSource) {
  const auto& [dtype, isa] = GetParam();
  const MoeSpec spec = every_part(dtype);
  const auto source = make_synthetic_source(spec, 7);
  const MemorySource memory(*source, 0);
  const Context context({.num_threads = 1, .isa = isa});
  const MoeLayer layer = MoeLayer::create(context, spec, memory, kInPlace);
  try {
    layer.on_ranks(context, {});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTensorMissing);
  }
  const MoeLayer next = layer.on_ranks(context, {}, &memory);
  EXPECT_EQ(next.plan().packed_bytes, 0U);
  const Tensor hidden = random_tensor(DType::kF32, 7, 83, 3);
  EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kF32).out,
                        run_layer(next, hidden.view(), DType::kF32).out));
}

TEST_P(InPlace, SlicesOfRanks_HaveTheBitsOfPackedWeights) {
  const auto& [dtype, isa] = GetParam();
  const MoeSpec spec = every_part(dtype);
  const auto source = make_synthetic_source(spec, 9);
  const MemorySource memory(*source, 1);
  const Context context({.num_threads = 2, .isa = isa});
  const Tensor hidden = random_tensor(DType::kBF16, 9, 83, 4);
  for (int32_t ep = 0; ep < 2; ++ep) {
    for (int32_t tp = 0; tp < 4; ++tp) {
      const ParallelSpec parallel{
          .ep_size = 2, .ep_rank = ep, .tp_size = 4, .tp_rank = tp, .reduce = Reduce::kPartial};
      const MoeLayer packed = MoeLayer::create(context, spec, *source, kPacked, parallel);
      const MoeLayer layer = MoeLayer::create(context, spec, memory, kInPlace, parallel);
      EXPECT_EQ(layer.plan().packed_bytes, 0U);
      EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kF32).out,
                            run_layer(packed, hidden.view(), DType::kF32).out))
          << "ep " << ep << " tp " << tp;
    }
  }
}

// More rows an expert than blocks of packed experts have.
TEST_P(InPlace, ManyRowsOfOneExpert_HaveTheBitsOfPackedWeights) {
  const auto& [dtype, isa] = GetParam();
  const MoeSpec spec = make_spec(2, 2, 64, 33, dtype);
  const auto source = make_synthetic_source(spec, 5);
  const MemorySource memory(*source, 0);
  const Context context({.num_threads = 2, .isa = isa});
  const LayerOptions many{.max_tokens = 500, .weights = WeightUse::kInPlace};
  const MoeLayer layer = MoeLayer::create(context, spec, memory, many);
  const MoeLayer packed = MoeLayer::create(context, spec, *source, {.max_tokens = 500});
  const Tensor hidden = random_tensor(DType::kBF16, 500, 64, 6);
  EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kBF16).out,
                        run_layer(packed, hidden.view(), DType::kBF16).out));
}

INSTANTIATE_TEST_SUITE_P(TypesAndIsas, InPlace,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kF16,
                                                              DType::kBF16),
                                            ::testing::ValuesIn(usable_isas())),
                         [](const auto& row) {
                           return std::string(to_string(std::get<0>(row.param))) + "_" +
                                  std::get<1>(row.param);
                         });

TEST(InPlaceParts, MatrixWithoutAView_PacksItsPartAlone) {
  const MoeSpec spec = every_part(DType::kBF16);
  const auto source = make_synthetic_source(spec, 7);
  MemorySource memory(*source, 0);
  memory.hidden_id = weights::kDown;
  memory.hidden_expert = 3;
  const Context context({.num_threads = 2});
  const MoeLayer layer = MoeLayer::create(context, spec, memory, kInPlace);
  const MoeLayer packed = MoeLayer::create(context, spec, *source, kPacked);
  const PlanRow* experts = weights_row(layer.plan(), "experts");
  ASSERT_NE(experts, nullptr);
  EXPECT_FALSE(experts->chosen);
  EXPECT_NE(experts->reason.find(memory.locate(weights::kDown, 3)), std::string::npos)
      << experts->reason;
  ASSERT_NE(weights_row(layer.plan(), "shared experts"), nullptr);
  EXPECT_TRUE(weights_row(layer.plan(), "shared experts")->chosen);
  EXPECT_GT(layer.plan().packed_bytes, 0U);
  EXPECT_LT(layer.plan().packed_bytes, packed.plan().packed_bytes);
  EXPECT_NE(explain(layer.plan()).find("in place"), std::string::npos);
  const Tensor hidden = random_tensor(DType::kBF16, 8, 83, 3);
  EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kBF16).out,
                        run_layer(packed, hidden.view(), DType::kBF16).out));
}

// The view belongs to an expert that this rank does not hold.
TEST(InPlaceParts, MatrixOfAnotherRank_DoesNotCount) {
  MoeSpec spec = make_spec(4, 2, 64, 32, DType::kF32);
  const auto source = make_synthetic_source(spec, 7);
  MemorySource memory(*source, 0);
  memory.hidden_id = weights::kUp;
  memory.hidden_expert = 3;
  const Context context({.num_threads = 1});
  for (int32_t rank = 0; rank < 2; ++rank) {
    const MoeLayer layer =
        MoeLayer::create(context, spec, memory, kInPlace,
                         {.ep_size = 2, .ep_rank = rank, .reduce = Reduce::kPartial});
    EXPECT_EQ(layer.plan().packed_bytes == 0, rank == 0);
  }
}

TEST(InPlaceParts, Codes_ArePackedAndThePlanSaysSo) {
  MoeSpec spec = make_spec(4, 2, 64, 32, DType::kI8);
  spec.quant.weights = WeightScale::kChannel;
  const auto source = make_synthetic_source(spec, 7);
  const Context context({.num_threads = 1});
  const MoeLayer layer = MoeLayer::create(context, spec, *source, kInPlace);
  const PlanRow* experts = weights_row(layer.plan(), "experts");
  ASSERT_NE(experts, nullptr);
  EXPECT_FALSE(experts->chosen);
  EXPECT_NE(experts->reason.find("codes"), std::string::npos) << experts->reason;
  EXPECT_EQ(layer.plan().in_place_bytes, 0U);
}

TEST(InPlaceParts, PlansAlone_AskTheSourceIfThereIsOne) {
  const MoeSpec spec = make_spec(4, 2, 64, 32, DType::kF32);
  const auto source = make_synthetic_source(spec, 7);
  const MemorySource memory(*source, 0);
  const Context context({.num_threads = 1});
  EXPECT_EQ(make_plan(context, spec, kInPlace).packed_bytes, 0U);
  EXPECT_EQ(make_plan(context, spec, kInPlace, {}, &memory).packed_bytes, 0U);
  EXPECT_GT(make_plan(context, spec, kInPlace, {}, source.get()).packed_bytes, 0U);
  EXPECT_EQ(weights_row(make_plan(context, spec, kPacked, {}, &memory), "experts"), nullptr);
}

TEST(InPlaceLayers, LargerPlan_ReadsTheSameMemory) {
  const MoeSpec spec = every_part(DType::kBF16);
  const auto source = make_synthetic_source(spec, 7);
  const MemorySource memory(*source, 0);
  const Context context({.num_threads = 2});
  const MoeLayer layer = MoeLayer::create(context, spec, memory, kInPlace);
  const MoeLayer larger = layer.with_max_tokens(200);
  EXPECT_EQ(larger.plan().in_place_bytes, layer.plan().in_place_bytes);
  EXPECT_EQ(larger.plan().packed_bytes, 0U);
  const Tensor hidden = random_tensor(DType::kBF16, 150, 83, 3);
  EXPECT_TRUE(same_bits(run_layer(layer, hidden.view(), DType::kBF16).out,
                        run_layer(larger, hidden.view(), DType::kBF16).out));
}

TEST(InPlaceLayers, Reload_TakesOtherMemoryStagedAndTheSameInPlace) {
  const MoeSpec spec = every_part(DType::kBF16);
  const auto one = make_synthetic_source(spec, 1);
  const auto two = make_synthetic_source(spec, 2);
  const MemorySource first(*one, 0);
  const MemorySource second(*two, 0);
  const Context context({.num_threads = 2});
  const Tensor hidden = random_tensor(DType::kBF16, 5, 83, 3);
  const auto output = [&](const MoeLayer& layer) {
    return run_layer(layer, hidden.view(), DType::kF32).out;
  };
  const Tensor of_one = output(MoeLayer::create(context, spec, *one, kPacked));
  const Tensor of_two = output(MoeLayer::create(context, spec, *two, kPacked));

  MoeLayer layer = MoeLayer::create(context, spec, first, kInPlace);
  // Refused before anything is overwritten, so that the layer goes on.
  EXPECT_EQ(code_of([&] { layer.reload(second, ReloadMode::kInPlace); }), ErrorCode::kState);
  EXPECT_TRUE(same_bits(output(layer), of_one));
  EXPECT_EQ(code_of([&] { layer.reload(*two, ReloadMode::kInPlace); }), ErrorCode::kState);
  EXPECT_EQ(code_of([&] { layer.reload(*two, ReloadMode::kStaged); }), ErrorCode::kState);
  EXPECT_TRUE(same_bits(output(layer), of_one));
  layer.reload(first, ReloadMode::kInPlace);
  EXPECT_TRUE(same_bits(output(layer), of_one));
  layer.reload(second, ReloadMode::kStaged);
  EXPECT_TRUE(same_bits(output(layer), of_two));
}

// A layer that packs gives back every block that it has copied, and no other.
class CountingSource final : public WeightSource {
 public:
  explicit CountingSource(const WeightSource& from) : from_(from) {}
  WeightInfo describe(WeightId id) const override { return from_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    from_.read(id, expert, block, destination);
  }
  ConstTensorView view(WeightId id, int64_t expert) const override {
    return from_.view(id, expert);
  }
  void release(WeightId id, int64_t expert, const WeightBlock& block) const override {
    const int64_t elements = (block.row_end - block.row_begin) * (block.col_end - block.col_begin);
    released_[{id.index(), expert}] += elements;
  }
  int64_t released(WeightId id, int64_t expert) const {
    const auto found = released_.find({id.index(), expert});
    return found == released_.end() ? 0 : found->second;
  }

 private:
  const WeightSource& from_;
  mutable std::map<std::pair<size_t, int64_t>, int64_t> released_;
};

TEST(InPlaceLayers, PackedViews_AreReleasedOnce) {
  const MoeSpec spec = every_part(DType::kF32);
  const auto source = make_synthetic_source(spec, 1);
  const MemorySource memory(*source, 0);
  const Context context({.num_threads = 1});
  const CountingSource packed_from(memory);
  const MoeLayer packed = MoeLayer::create(context, spec, packed_from, kPacked);
  const CountingSource read_from(memory);
  const MoeLayer in_place = MoeLayer::create(context, spec, read_from, kInPlace);
  for (const WeightId id :
       {weights::kGate, weights::kUp, weights::kDown, weights::kSharedUp, weights::kResidualDown}) {
    const WeightInfo info = source->describe(id);
    for (int64_t expert = 0; expert < info.count; ++expert) {
      EXPECT_EQ(packed_from.released(id, expert), info.rows * info.cols) << to_string(id);
      EXPECT_EQ(read_from.released(id, expert), 0) << to_string(id);
    }
  }
}

}  // namespace
}  // namespace conclave
