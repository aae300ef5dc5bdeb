// Parts of layers with weights that are codes: slices and experts of ranks, reloads, workers; and
// numbers that give codes no meaning.
#include "layer/coded_specs.h"
#include "quant/weight_format.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::coded_spec;
using testing::e4m3_spec;
using testing::make_layer;
using testing::OwnedLayer;
using testing::random_tensor;
using testing::run_layer;
using testing::same_bits;
using testing::types_without_zeros;

constexpr auto kTensor = WeightScale::kTensor;
constexpr auto kChannel = WeightScale::kChannel;
constexpr auto kBlock = WeightScale::kBlock;
using enum ActivationScale;

// Changes one number to a bad value, in any role.
template <class T>
class BadNumber final : public WeightSource {
 public:
  BadNumber(const WeightSource& base, WeightId role, T value)
      : base_(base), role_(role), value_(value) {}
  WeightInfo describe(WeightId role) const override { return base_.describe(role); }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    base_.read(role, expert, block, destination);
    if (role == role_ && expert == 1) std::memcpy(destination.data(), &value_, sizeof(value_));
  }

 private:
  const WeightSource& base_;
  WeightId role_;
  T value_;
};
template <class T>
std::string refusal_of(const MoeSpec& spec, const WeightSource& source, WeightId role, T value) {
  const Context context({.num_threads = 1});
  try {
    static_cast<void>(MoeLayer::create(context, spec, BadNumber<T>(source, role, value)));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTensorValue) << error.what();
    return error.detail().tensor;
  }
  return "accepted";
}

TEST(E4m3Scales, BadValues_AreRefusedNamingTheTensor) {
  const MoeSpec spec = e4m3_spec(4, 2, 64, 32, {.weights = kTensor, .activations = kTensorStatic});
  const auto source = make_synthetic_source(spec, 3);
  const auto refusal = [&](WeightId role, float value) {
    return refusal_of(spec, *source, role, value);
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(refusal(weights::kGate.with(WeightPlane::kScale), nan), "gate_scale of expert 1");
  EXPECT_EQ(refusal(weights::kUp.with(WeightPlane::kScale), infinity), "up_scale of expert 1");
  EXPECT_EQ(refusal(weights::kDown.with(WeightPlane::kScale), -0.5F), "down_scale of expert 1");
  EXPECT_EQ(refusal(weights::kDown.with(WeightPlane::kScale), 0.0F), "accepted")
      << "a block of zeros";
  EXPECT_EQ(refusal(weights::kDown.with(WeightPlane::kInputScale), 0.0F),
            "down_input_scale of expert 1");
  EXPECT_EQ(refusal(weights::kGate.with(WeightPlane::kInputScale), nan),
            "gate_input_scale of expert 1");
}

TEST(MeaningOfCodes, BadValues_AreRefusedNamingTheTensor) {
  // Rows of f32 weights elsewhere, so that zeros are stored as f32.
  MoeSpec spec = coded_spec(DType::kI4, 4, 2, 64, 32,
                            {.weights = kBlock,
                             .block_rows = 1,
                             .block_cols = 16,
                             .zeros = WeightZero::kPoint,
                             .has_global_scale = true,
                             .has_column_order = true,
                             .has_column_factors = true});
  const auto source = make_synthetic_source(spec, 3);
  const float infinity = std::numeric_limits<float>::infinity();
  using namespace weights;
  const WeightId zero = kUp.with(WeightPlane::kZero);
  // A NaN, in bf16 and in float32.
  EXPECT_EQ(refusal_of(spec, *source, zero, int32_t{0x7fc07fc0}), "up_zero of expert 1");
  EXPECT_EQ(refusal_of(spec, *source, kGate.with(WeightPlane::kGlobalScale), infinity),
            "gate_global_scale of expert 1");
  EXPECT_EQ(refusal_of(spec, *source, kDown.with(WeightPlane::kGlobalScale), -1.0F),
            "down_global_scale of expert 1");
  const WeightId order = kDown.with(WeightPlane::kColumnOrder);
  EXPECT_EQ(refusal_of(spec, *source, order, int32_t{2}), "down_column_order of expert 1");
  EXPECT_EQ(refusal_of(spec, *source, order, int32_t{-1}), "down_column_order of expert 1");
  EXPECT_EQ(refusal_of(spec, *source, order, int32_t{1}), "accepted");
  const WeightId factor = kDown.with(WeightPlane::kColumnFactor);
  EXPECT_EQ(refusal_of(spec, *source, factor, int32_t{0x7fc07fc0}),
            "down_column_factor of expert 1");
  EXPECT_EQ(refusal_of(spec, *source, factor, int32_t{0}), "accepted");
  // Gate and up read one row.
  EXPECT_EQ(refusal_of(spec, *source, kUp.with(WeightPlane::kColumnFactor), int32_t{0}),
            "up of expert 1");
  EXPECT_EQ(refusal_of(spec, *source, kGate.with(WeightPlane::kColumnFactor), int32_t{0}),
            "up of expert 1");
}

// A source without some factors: a kind of matrix that has none has ones.
class WithoutFactors final : public WeightSource {
 public:
  WithoutFactors(const WeightSource& base, WeightMatrix matrix, bool are_ones)
      : base_(base), matrix_(matrix), are_ones_(are_ones) {}
  WeightInfo describe(WeightId id) const override {
    WeightInfo info = base_.describe(id);
    if (is_factor(id)) info.dtype = DType::kF32;
    if (is_factor(id) && !are_ones_) info.count = 0;
    return info;
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (!is_factor(id)) return base_.read(id, expert, block, destination);
    const float one = 1;
    for (size_t at = 0; at < destination.size(); at += sizeof(one)) {
      std::memcpy(destination.data() + at, &one, sizeof(one));
    }
  }

 private:
  bool is_factor(WeightId id) const {
    return id.plane() == WeightPlane::kColumnFactor &&
           (id.matrix() == WeightMatrix::kDown) == (matrix_ == WeightMatrix::kDown);
  }
  const WeightSource& base_;
  WeightMatrix matrix_;
  bool are_ones_;
};

TEST(ColumnFactors, LeftOutForAKindOfMatrix_AreOnes) {
  const Context context({.num_threads = 1});
  const MoeSpec spec =
      coded_spec(DType::kI4, 4, 2, 64, 48, {.weights = kChannel, .has_column_factors = true});
  const auto source = make_synthetic_source(spec, 3);
  const Tensor hidden = random_tensor(DType::kF32, 5, 64, 1);
  for (const WeightMatrix matrix : {WeightMatrix::kUp, WeightMatrix::kDown}) {
    const WithoutFactors absent(*source, matrix, false);
    const WithoutFactors ones(*source, matrix, true);
    const MoeLayer layer = MoeLayer::create(context, spec, absent);
    const MoeLayer expected = MoeLayer::create(context, spec, ones);
    const auto output = run_layer(layer, hidden.view(), DType::kF32);
    EXPECT_TRUE(same_bits(output.out, run_layer(expected, hidden.view(), DType::kF32).out));
    const StageCheck check =
        check_against_reference(context, spec, absent, output.result(hidden.view()));
    EXPECT_LE(check.worst_token_error, accuracy_bar(DType::kI4, DType::kF32));
  }
}

// Partial sums of whole experts per rank, or of slices of whole blocks, add up to the layer.
Tensor sum_of_parts(const Context& context, const MoeSpec& spec, const WeightSource& source,
                    const Tensor& hidden, const std::vector<ParallelSpec>& parts) {
  const int64_t tokens = hidden.shape()[0];
  Tensor sum(DType::kF32, {tokens, spec.hidden_size});
  for (const ParallelSpec& part : parts) {
    const MoeLayer layer = MoeLayer::create(context, spec, source, {}, part);
    const auto output = run_layer(layer, hidden.view(), DType::kF32);
    for (int64_t i = 0; i < tokens * spec.hidden_size; ++i) {
      sum.as<float>()[i] += output.out.as<float>()[i];
    }
  }
  return sum;
}

void expect_sum_accurate(const MoeSpec& spec, const std::vector<ParallelSpec>& parts) {
  const Context context({.num_threads = 2});
  const auto source = make_synthetic_source(spec, 4);
  const Tensor hidden = random_tensor(DType::kBF16, 7, spec.hidden_size, 9);
  const Tensor sum = sum_of_parts(context, spec, *source, hidden, parts);
  const ReferenceResult expected =
      reference_forward(context, spec, *source, {.hidden = hidden.view()});
  EXPECT_LE(worst(token_errors(sum.view(), expected.output)),
            accuracy_bar(spec.weight_dtype, DType::kF32));
}

class CodedParts : public ::testing::TestWithParam<DType> {
 protected:
  // Zeros, a global scale, an order of columns and their factors.
  static QuantSpec full_meaning() {
    return {.weights = kBlock,
            .block_rows = 1,
            .block_cols = 32,
            .zeros = WeightZero::kPoint,
            .has_global_scale = true,
            .has_column_order = true,
            .has_column_factors = true};
  }
  static MoeSpec spec(int64_t experts, int64_t top_k, int64_t hidden, int64_t inner,
                      const QuantSpec& quant) {
    return coded_spec(GetParam(), experts, top_k, hidden, inner, quant);
  }
};
INSTANTIATE_TEST_SUITE_P(Catalog, CodedParts, ::testing::ValuesIn(types_without_zeros()),
                         [](const auto& test) {
                           return std::string(quant::format_of(test.param).name);
                         });

TEST_P(CodedParts, Slices_AddUp) {
  const auto slices = [](int32_t ranks) {
    std::vector<ParallelSpec> parts;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      parts.push_back({.tp_size = ranks, .tp_rank = rank, .reduce = Reduce::kPartial});
    }
    return parts;
  };
  expect_sum_accurate(spec(4, 2, 200, 256, {.weights = kBlock, .activations = kGroup}), slices(2));
  expect_sum_accurate(spec(4, 2, 200, 90, {.weights = kChannel}), slices(3));
  expect_sum_accurate(spec(4, 2, 200, 90, {.weights = kTensor, .activations = kTensorStatic}),
                      slices(4));
  expect_sum_accurate(spec(4, 2, 200, 91, full_meaning()), slices(3));
}

// Slices are whole groups of the rows and begin inside groups of the weights, whose scales follow
// the whole matrix's columns.
TEST_P(CodedParts, SlicesWithRowsOfSmallFloats_AddUp) {
  QuantSpec quant{.weights = kBlock,
                  .block_rows = 1,
                  .block_cols = 48,
                  .activations = kGroup,
                  .activation_group = 32,
                  .activation_dtype = DType::kF4,
                  .activation_scale_rule = RowScaleRule::kEvenPower};
  std::vector<ParallelSpec> parts;
  for (int32_t rank = 0; rank < 3; ++rank) {
    parts.push_back({.tp_size = 3, .tp_rank = rank, .reduce = Reduce::kPartial});
  }
  expect_sum_accurate(spec(4, 2, 200, 192, quant), parts);
  quant.activation_group = 16;
  quant.activation_scale_rule = RowScaleRule::kTwoLevel;
  quant.has_global_scale = true;
  expect_sum_accurate(spec(4, 2, 200, 192, quant), parts);
  for (int32_t rank = 0; rank < 3; ++rank) {
    parts[static_cast<size_t>(rank)] = {.ep_size = 3, .ep_rank = rank, .reduce = Reduce::kPartial};
  }
  expect_sum_accurate(spec(7, 3, 200, 136, quant), parts);
}

TEST_P(CodedParts, SlicesWithoutColumns_AddUp) {
  for (const QuantSpec& quant :
       {QuantSpec{.weights = kBlock, .activations = kGroup}, QuantSpec{.weights = kChannel},
        QuantSpec{.weights = kTensor, .activations = kTensorStatic}}) {
    std::vector<ParallelSpec> parts;
    for (int32_t rank = 0; rank < 2; ++rank) {
      parts.push_back({.tp_size = 2, .tp_rank = rank, .reduce = Reduce::kPartial});
    }
    expect_sum_accurate(spec(4, 2, 40, 1, quant), parts);
  }
}

TEST_P(CodedParts, Experts_AddUp) {
  std::vector<ParallelSpec> parts;
  for (int32_t rank = 0; rank < 3; ++rank) {
    parts.push_back({.ep_size = 3, .ep_rank = rank, .reduce = Reduce::kPartial});
  }
  expect_sum_accurate(spec(7, 3, 200, 136, {.weights = kBlock, .activations = kGroup}), parts);
  expect_sum_accurate(spec(7, 3, 200, 136, {.weights = kTensor, .activations = kTensorStatic}),
                      parts);
  expect_sum_accurate(spec(7, 3, 200, 136, full_meaning()), parts);
}

TEST_P(CodedParts, ReloadOfTheSameWeights_GivesTheSameBits) {
  for (const QuantSpec& quant :
       {QuantSpec{.weights = kTensor, .activations = kTensorStatic}, full_meaning()}) {
    OwnedLayer owned = make_layer(spec(4, 2, 96, 64, quant));
    const Tensor hidden = random_tensor(DType::kBF16, 5, 96, 2);
    const auto before = run_layer(owned.layer, hidden.view(), DType::kBF16);
    const auto other = make_synthetic_source(owned.layer.spec(), 99);
    for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
      owned.layer.reload(*other, mode);
      EXPECT_FALSE(same_bits(run_layer(owned.layer, hidden.view(), DType::kBF16).out, before.out));
      owned.layer.reload(*owned.source, mode);
      EXPECT_TRUE(same_bits(run_layer(owned.layer, hidden.view(), DType::kBF16).out, before.out));
    }
  }
}

// Many workers pack small parts: the first of an expert brings its orders of columns.
TEST_P(CodedParts, AnyNumberOfWorkers_PacksTheSameBits) {
  MoeSpec layer_spec = spec(3, 2, 260, 200, full_meaning());
  layer_spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 150};
  const Tensor hidden = random_tensor(DType::kF32, 9, 260, 2);
  const auto run = [&](int32_t threads) {
    const OwnedLayer owned = make_layer(layer_spec, {}, {.num_threads = threads});
    return run_layer(owned.layer, hidden.view(), DType::kF32).out;
  };
  const Tensor expected = run(1);
  for (const int32_t threads : {2, 3, 8}) EXPECT_TRUE(same_bits(run(threads), expected)) << threads;
}

}  // namespace
}  // namespace conclave
