// Tests where codes whose columns have an order lie on a GPU, which any machine can work out: every
// stored weight has one place with its own scale, whatever the orders, slices and ranks.

#include "layer/cuda/column_orders.h"

#include "core/code_bits.h"
#include "layer/cuda/expert_places.h"
#include "layer/cuda/h200_plan.h"
#include "layer/cuda/ordered_source.h"
#include "layer/cuda/own_row_form.h"
#include "quant/code_meaning.h"
#include "support/layer_fixture.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_spec;
using testing::OneOrder;
using testing::plan;
using Columns = std::vector<int32_t>;

TEST(ColumnOrders, Groups_LieSideBySideInUnits) {
  const ColumnArrangement even = arrange_columns(Columns{1, 0, 1, 0}, 2);
  EXPECT_EQ(even.columns, (Columns{1, 3, 0, 2}));
  EXPECT_EQ(even.groups, (Columns{0, 1}));
  // The group that fills no unit is the last, wherever it is stored.
  const ColumnArrangement ragged = arrange_columns(Columns{0, 1, 2, 1, 2}, 2);
  EXPECT_EQ(ragged.columns, (Columns{1, 3, 2, 4, 0}));
  EXPECT_EQ(ragged.groups, (Columns{1, 2, 0}));
  const ColumnArrangement uneven = arrange_columns(Columns{0, 1, 0, 1, 1, 0}, 2);
  EXPECT_EQ(uneven.columns, (Columns{0, 2, 5, -1, 1, 3, 4}));
  EXPECT_EQ(uneven.groups, (Columns{0, 0, 1, 1}));
  // One group may fill several units, and others none.
  const ColumnArrangement wide = arrange_columns(Columns{4, 4, 4, 4, 0}, 2);
  EXPECT_EQ(wide.columns, (Columns{0, 1, 2, 3, 4}));
  EXPECT_EQ(wide.groups, (Columns{4, 4, 0}));
  EXPECT_TRUE(arrange_columns({}, 2).columns.empty());
}

TEST(ColumnOrders, Codes_GoToTheirPlaces) {
  const std::array row = {std::byte{0x21}, std::byte{0x43}, std::byte{0x65}};
  std::array<std::byte, 3> out{};
  place_codes(row.data(), Columns{5, 0, -1, 2, 4}, 4, out.data());
  EXPECT_EQ(out, (std::array{std::byte{0x16}, std::byte{0x30}, std::byte{0x05}}));
  place_codes(row.data(), Columns{2, -1, 0}, 8, out.data());
  EXPECT_EQ(out, (std::array{std::byte{0x65}, std::byte{0}, std::byte{0x21}}));
}

MoeSpec ordered_spec(int64_t hidden, int64_t inner, int64_t group, DType dtype = DType::kI4) {
  MoeSpec spec = make_spec(4, 2, hidden, inner, dtype);
  spec.quant = {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = group};
  spec.quant.has_column_order = true;
  return spec;
}

// The plan that a layer of these weights gets.
CudaPlan plan_of(const MoeSpec& spec, const WeightSource& source,
                 const ParallelSpec& parallel = {}) {
  const CudaPlan assumed = plan(spec, {.max_tokens = 64}, parallel);
  LayerOrders orders;
  orders.routed = read_order(routed_source(assumed), source);
  if (assumed.shared && assumed.shared->problem.ordered.gate_up != 0) {
    orders.shared = read_order(shared_source(assumed), source);
  }
  const cuda::DeviceInfo device = testing::h200();
  const LayerOptions options{.max_tokens = 64};
  return plan_cuda_layer(
      {.spec = spec, .options = options, .parallel = parallel, .device = device, .orders = orders});
}

// Each column has one place, whose group is that of the order.
void expect_columns(const MatrixPlaces& places, const std::vector<int32_t>& order) {
  std::vector<int> found(order.size(), 0);
  for (size_t place = 0; place < places.columns.size(); ++place) {
    const int32_t column = places.columns[place];
    if (column < 0) continue;
    ++found[static_cast<size_t>(column)];
    const size_t group = place / static_cast<size_t>(places.group);
    EXPECT_EQ(places.groups[group], order[static_cast<size_t>(column)]) << place;
  }
  EXPECT_TRUE(std::ranges::all_of(found, [](int times) { return times == 1; }));
}

void expect_every_column_once(const MlpSource& mlp, const WeightSource& source) {
  const experts::ExpertsProblem& problem = mlp.problem;
  for (const LocalExpert& expert : mlp.experts) {
    const ExpertPlaces places = places_of(mlp, expert, source);
    const auto check = [&](WeightMatrix matrix) {
      expect_columns(places.of(matrix),
                     load_column_order(problem.quant, source, expert.id(matrix), expert.expert,
                                       expert.block_of(matrix, problem.hidden_size)));
    };
    if (problem.activation.gated) check(WeightMatrix::kGate);
    check(WeightMatrix::kUp);
    check(WeightMatrix::kDown);
    EXPECT_EQ(places.up.rows, places.down.columns);
    EXPECT_EQ(std::ssize(places.down.columns), problem.intermediate_size);
    EXPECT_EQ(std::ssize(places.up.columns), problem.input_columns());
    // A row has one column at a place.
    for (size_t i = 0; i < places.gate.columns.size(); ++i) {
      const int32_t gate = places.gate.columns[i];
      const int32_t up = places.up.columns[i];
      EXPECT_TRUE(gate == up || gate < 0 || up < 0) << i;
    }
  }
}

TEST(ColumnOrders, EveryColumn_HasOnePlaceWithItsScale) {
  for (const auto& [hidden, inner, group] :
       {std::array<int64_t, 3>{256, 128, 32}, {127, 65, 32}, {160, 96, 128}, {80, 48, 16}}) {
    for (const bool gated : {true, false}) {
      MoeSpec spec = ordered_spec(hidden, inner, group);
      if (!gated) spec.activation = {.name = "relu2_no_mul"};
      SCOPED_TRACE(std::to_string(hidden) + "x" + std::to_string(inner));
      const auto apart = make_synthetic_source(spec, 3);
      const CudaPlan of_two = plan_of(spec, *apart);
      expect_every_column_once(routed_source(of_two), *apart);
      const OneOrder alike(*apart);
      const CudaPlan of_one = plan_of(spec, alike);
      expect_every_column_once(routed_source(of_one), alike);
      // Without empty places, and with gate's and up's columns once.
      EXPECT_EQ(of_one.routed.problem.input_columns(), hidden);
      EXPECT_EQ(of_one.routed.problem.intermediate_size, inner);
      EXPECT_EQ(of_one.routed.ladder.front().row->name, "cuda.stream_codes_sm90");
      if (gated) {
        EXPECT_GE(of_two.routed.problem.input_columns(), 2 * hidden);
      }
    }
  }
}

TEST(ColumnOrders, SlicesOfRanks_HaveTheGroupsOfTheirColumns) {
  MoeSpec spec = ordered_spec(128, 384, 64);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 192};
  const auto source = make_synthetic_source(spec, 5);
  for (const int32_t ranks : {2, 3}) {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      SCOPED_TRACE(std::to_string(rank) + " of " + std::to_string(ranks));
      const ParallelSpec parallel{.tp_size = ranks, .tp_rank = rank, .reduce = Reduce::kPartial};
      const CudaPlan made = plan_of(spec, *source, parallel);
      expect_every_column_once(routed_source(made), *source);
      expect_every_column_once(shared_source(made), *source);
      EXPECT_EQ(made.routed.ladder.front().row->name, "cuda.stream_codes_sm90");
      // What is assumed without weights has room for these.
      const CudaPlan assumed = plan(spec, {.max_tokens = 64}, parallel);
      EXPECT_GE(assumed.routed.problem.intermediate_size, made.routed.problem.intermediate_size);
      EXPECT_GE(made.routed.problem.intermediate_size, 384 / ranks);
    }
  }
}

TEST(ColumnOrders, ExpertsOfARank_AreItsOwn) {
  const MoeSpec spec = ordered_spec(96, 64, 32);
  const auto source = make_synthetic_source(spec, 5);
  for (int32_t rank = 0; rank < 2; ++rank) {
    const ParallelSpec parallel{.ep_size = 2, .ep_rank = rank, .reduce = Reduce::kPartial};
    const CudaPlan made = plan_of(spec, *source, parallel);
    const MlpSource mlp = routed_source(made);
    EXPECT_EQ(mlp.count(), 2);
    expect_every_column_once(mlp, *source);
  }
}

// A reload brings other weights, which must lie as the first ones.
TEST(ColumnOrders, OtherOrders_AreRefusedByName) {
  const MoeSpec spec = ordered_spec(128, 64, 32);
  const auto apart = make_synthetic_source(spec, 3);
  const OneOrder alike(*apart);
  const CudaPlan of_one = plan_of(spec, alike);
  const MlpSource mlp = routed_source(of_one);
  try {
    static_cast<void>(places_of(mlp, mlp.experts.front(), *apart));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("order of gate"), std::string::npos) << error.what();
  }
  // The layout of two orders has room for one.
  const CudaPlan of_two = plan_of(spec, *apart);
  expect_every_column_once(routed_source(of_two), alike);
  const testing::UnevenOrder uneven(*apart);
  EXPECT_EQ(code_of([&] { static_cast<void>(places_of(mlp, mlp.experts.front(), uneven)); }),
            ErrorCode::kUnsupported);
}

TEST(ColumnOrders, UnevenGroups_TakeKernelsOfTensorCoresOnly) {
  const MoeSpec spec = ordered_spec(128, 64, 32);
  const auto apart = make_synthetic_source(spec, 3);
  const testing::UnevenOrder uneven(*apart);
  const CudaPlan made = plan_of(spec, uneven);
  expect_every_column_once(routed_source(made), uneven);
  EXPECT_EQ(made.routed.problem.ordered.gate_up_group, 16);
  EXPECT_NE(explain(made.summary).find("orders of their own"), std::string::npos);
  EXPECT_GT(made.routed.problem.input_columns(), 128);
  EXPECT_EQ(made.routed.ladder.front().row->name, "cuda.stream_codes_sm90");
  const auto row = std::ranges::find_if(made.summary.rows, [](const PlanRow& candidate) {
    return candidate.name == "cuda.reference";
  });
  ASSERT_NE(row, made.summary.rows.end());
  EXPECT_NE(row->reason.find("32 columns of this rank"), std::string::npos) << row->reason;
}

TEST(ColumnOrders, Groups_ThatAreNone_AreRefused) {
  const MoeSpec spec = ordered_spec(128, 64, 32);
  const auto source = make_synthetic_source(spec, 3);
  const testing::WrongOrder wrong(*source);
  EXPECT_EQ(code_of([&] { static_cast<void>(plan_of(spec, wrong)); }), ErrorCode::kTensorValue);
}

// Rows of slots take the launches, the buffers and the kernels that a plan says.
TEST(ColumnOrders, Plans_HaveRowsOfSlots) {
  MoeSpec spec = ordered_spec(256, 128, 32);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 128};
  const CudaPlan ordered = plan(spec, {.max_tokens = 64});
  EXPECT_EQ(ordered.rows_per_token(), spec.top_k);
  EXPECT_EQ(ordered.fused.slots(), 0);
  EXPECT_EQ(ordered.decode_row, nullptr);
  EXPECT_TRUE(ordered.stages.has(CudaStage::kRowsOfSlots));
  EXPECT_NE(explain(ordered.summary).find("rows of slots"), std::string::npos);
  EXPECT_NE(explain(ordered.summary).find("assumed without weights"), std::string::npos);
  EXPECT_EQ(own_row_form(ordered.routed).width, 256);
  EXPECT_EQ(own_row_form(ordered.routed).term_columns, 0);
  spec.quant.has_column_order = false;
  EXPECT_FALSE(plan(spec, {.max_tokens = 64}).routed.has_own_rows());
  // Products with factors keep the bits of two numbers of bf16.
  spec.quant.has_column_factors = true;
  const CudaPlan scaled = plan(spec, {.max_tokens = 64});
  EXPECT_TRUE(scaled.routed.has_own_rows());
  EXPECT_EQ(own_row_form(scaled.routed).term_columns, 256);
  EXPECT_EQ(own_row_form(scaled.routed).width, 512);
  const CudaPlan plain = plan(spec, {.max_tokens = 64, .kernel = "cuda.reference"});
  EXPECT_EQ(own_row_form(plain.routed).dtype, DType::kF32);
  spec.weight_dtype = DType::kF8E4M3;
  spec.quant.activations = ActivationScale::kTensorStatic;
  const CudaPlan coded = plan(spec, {.max_tokens = 64});
  EXPECT_EQ(own_row_form(coded.routed).dtype, DType::kF32);
  EXPECT_EQ(coded.routed.ladder.front().row->name, "cuda.stream_codes_sm90");
}

// Checkpoints of every method that orders columns or has factors of them.
TEST(ColumnOrders, GoldenCheckpoints_ArePlannedForTensorCores) {
  const std::filesystem::path root = "testdata/quantised";
  if (!std::filesystem::is_directory(root)) GTEST_SKIP() << root << " is not here";
  int count = 0;
  for (const auto& folder : std::filesystem::directory_iterator(root)) {
    if (!folder.is_directory()) continue;
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    const CheckpointLayer& layer = checkpoint.layers().front();
    const QuantSpec& quant = layer.spec.quant;
    if (!quant.has_column_order && !quant.has_column_factors) continue;
    SCOPED_TRACE(folder.path().string());
    ++count;
    const auto source = checkpoint.layer_source(layer.index);
    const CudaPlan made = quant.has_column_order ? plan_of(layer.spec, *source) : plan(layer.spec);
    for (const experts::LadderRung& rung : made.routed.ladder) {
      EXPECT_EQ(rung.row->name, "cuda.stream_codes_sm90");
    }
    if (quant.has_column_order) expect_every_column_once(routed_source(made), *source);
  }
  EXPECT_EQ(count, 13);
}

}  // namespace
}  // namespace conclave
