// Compares layers of mxfp4 weights and rows of e4m3, whose products are those of bytes, with
// float64.
#include "device_layer.h"
#include "layer/cuda/few_tokens.h"

#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::copy_rows;
using testing::CudaLayerTest;
using testing::DeviceLayer;
using testing::make_spec;
using testing::random_tensor;

constexpr const char* kKernel = "cuda.tile_fp4_fp8_sm90";

QuantSpec mxfp4_beside(ActivationScale rows, bool power_of_two = false) {
  return {.weights = WeightScale::kBlock,
          .block_rows = 1,
          .block_cols = 32,
          .activations = rows,
          .power_of_two_scales = power_of_two,
          .scale_values = ScaleValues::kPowerOfTwo};
}

// Each kind of scale that rows of e4m3 have.
std::vector<QuantSpec> kinds_of_rows() {
  QuantSpec global = mxfp4_beside(ActivationScale::kToken);
  global.has_global_scale = true;
  return {mxfp4_beside(ActivationScale::kToken),        mxfp4_beside(ActivationScale::kToken, true),
          mxfp4_beside(ActivationScale::kTensorStatic), mxfp4_beside(ActivationScale::kGroup),
          mxfp4_beside(ActivationScale::kGroup, true),  global};
}

class CudaSmallFloats : public CudaLayerTest {};

// Scales of every matrix count down from 1 by powers of two, `span` of them, column by column.
class CountingDown final : public WeightSource {
 public:
  CountingDown(std::unique_ptr<WeightSource> inner, int64_t span)
      : inner_(std::move(inner)), span_(span) {}

  WeightInfo describe(WeightId id) const override { return inner_->describe(id); }
  std::string locate(WeightId id, int64_t expert) const override {
    return inner_->locate(id, expert);
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner_->read(id, expert, block, destination);
    if (!id.mlp() || id.plane() != WeightPlane::kScale) return;
    constexpr int64_t kOne = 127;
    const int64_t width = block.col_end - block.col_begin;
    for (size_t i = 0; i < destination.size(); ++i) {
      const int64_t row = block.row_begin + static_cast<int64_t>(i) / width;
      const int64_t group = block.col_begin + static_cast<int64_t>(i) % width;
      destination[i] = static_cast<std::byte>(kOne - (row + 5 * group) % (span_ + 1));
    }
  }

 private:
  std::unique_ptr<WeightSource> inner_;
  int64_t span_;
};

void expect_accurate(DeviceLayer& owned, int64_t tokens) {
  testing::expect_accurate(owned, tokens,
                           accuracy_bar(owned.layer.spec().weight_dtype, DType::kBF16));
}

TEST_F(CudaSmallFloats, RowsOfEveryKind_AreWithinTheBar) {
  MoeSpec shared = make_spec(6, 2, 256, 128, DType::kF4);
  shared.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 256};
  MoeSpec on_input = make_spec(6, 3, 160, 96, DType::kF4);
  on_input.weight_on = WeightOn::kInput;
  MoeSpec biased = make_spec(5, 2, 704, 352, DType::kF4);
  biased.has_bias = true;
  biased.activation = {.name = "swiglu_oai", .limit = 7.0, .alpha = 1.702, .beta = 1.0};
  MoeSpec plain = make_spec(5, 2, 128, 64, DType::kF4);
  plain.activation = {.name = "relu2_no_mul"};
  const MoeSpec alone = make_spec(3, 1, 288, 416, DType::kF4);
  for (MoeSpec spec : {shared, on_input, biased, plain, alone}) {
    for (const QuantSpec& quant : kinds_of_rows()) {
      SCOPED_TRACE(::testing::Message()
                   << spec.hidden_size << ", rows of kind " << static_cast<int>(quant.activations));
      spec.quant = quant;
      DeviceLayer owned(spec, {.max_tokens = 700, .kernel = kKernel});
      for (const int64_t tokens : {1, 8, 40, 127, 129, 700}) expect_accurate(owned, tokens);
    }
  }
}

// Sums over many columns, whose stages fill the ring several times, of experts with many rows.
TEST_F(CudaSmallFloats, LongSums_AreWithinTheBar) {
  for (const ActivationScale rows : {ActivationScale::kToken, ActivationScale::kGroup}) {
    MoeSpec spec = make_spec(4, 2, 2880, 1440, DType::kF4);
    spec.quant = mxfp4_beside(rows);
    DeviceLayer owned(spec, {.max_tokens = 1100, .kernel = kKernel});
    expect_accurate(owned, 1100);
  }
}

TEST_F(CudaSmallFloats, Results_DoNotDependOnOtherTokensAndRepeat) {
  for (const ActivationScale rows : {ActivationScale::kToken, ActivationScale::kGroup}) {
    MoeSpec spec = make_spec(5, 2, 704, 352, DType::kF4);
    spec.quant = mxfp4_beside(rows);
    DeviceLayer owned(spec, {.max_tokens = 600, .kernel = kKernel});
    const Tensor hidden = random_tensor(DType::kBF16, 600, spec.hidden_size, 5);
    const Tensor together = testing::run_device_layer(owned, hidden.view(), DType::kBF16).out;
    for (int i = 0; i < 100; ++i) {
      const Tensor again = testing::run_device_layer(owned, hidden.view(), DType::kBF16).out;
      ASSERT_EQ(std::memcmp(again.as<std::byte>(), together.as<std::byte>(), again.size_bytes()),
                0);
    }
    const size_t row_bytes = static_cast<size_t>(spec.hidden_size) * sizeof(uint16_t);
    for (const int64_t token : {0, 131, 599}) {
      const Tensor row = copy_rows(hidden, token, 1);
      const Tensor out = testing::run_device_layer(owned, row.view(), DType::kBF16).out;
      EXPECT_EQ(
          std::memcmp(out.as<std::byte>(),
                      together.as<std::byte>() + static_cast<size_t>(token) * row_bytes, row_bytes),
          0)
          << token;
    }
  }
}

TEST_F(CudaSmallFloats, ValuesThatAreNotFinite_StayInTheirRow) {
  for (const QuantSpec& quant : kinds_of_rows()) {
    MoeSpec spec = make_spec(5, 2, 256, 128, DType::kF4);
    spec.quant = quant;
    DeviceLayer owned(spec, {.max_tokens = 300, .kernel = kKernel});
    testing::expect_bad_rows_stay_apart(owned, 300);
  }
}

// An exponent of e5m2 has room for scales that lie 2^26 apart, and for no others.
TEST_F(CudaSmallFloats, ScalesFarApart_TakeExactKernelsAndSayWhy) {
  MoeSpec spec = make_spec(4, 2, 1056, 512, DType::kF4);
  spec.quant = mxfp4_beside(ActivationScale::kToken);
  const auto counting_down = [&](int64_t span) {
    return std::make_unique<CountingDown>(make_synthetic_source(spec, 7), span);
  };
  DeviceLayer near(spec, counting_down(26), {.max_tokens = 300, .kernel = kKernel});
  for (const int64_t tokens : {1, 300}) expect_accurate(near, tokens);
  DeviceLayer far(spec, counting_down(27), {.max_tokens = 4096});
  for (const int64_t tokens : {1, 300}) expect_accurate(far, tokens);
  bool is_told = false;
  for (const PlanRow& row : far.layer.plan().rows) {
    if (row.name != kKernel) continue;
    is_told = true;
    EXPECT_FALSE(row.chosen);
    EXPECT_NE(row.reason.find("2^-27"), std::string::npos) << row.reason;
  }
  EXPECT_TRUE(is_told);
  try {
    const DeviceLayer refused(spec, counting_down(27), {.max_tokens = 300, .kernel = kKernel});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
  for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
    try {
      near.layer.reload(*counting_down(27), mode);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTensorValue);
      EXPECT_NE(std::string(error.what()).find("2^-27"), std::string::npos) << error.what();
    }
  }
}

// The plan for many tokens takes the kernel by itself, and other sizes say why it is not taken.
TEST_F(CudaSmallFloats, Plan_TakesTheKernelForManyRows) {
  MoeSpec spec = make_spec(8, 2, 2048, 768, DType::kF4);
  spec.quant = mxfp4_beside(ActivationScale::kToken);
  DeviceLayer owned(spec, {.max_tokens = 4096});
  expect_accurate(owned, 4096);
  const auto row_of = [](const DeviceLayer& layer) {
    for (const PlanRow& row : layer.layer.plan().rows) {
      if (row.name == kKernel) return row;
    }
    return PlanRow{};
  };
  EXPECT_TRUE(row_of(owned).chosen) << row_of(owned).reason;
  MoeSpec odd = make_spec(8, 2, 2048, 776, DType::kF4);
  odd.quant = spec.quant;
  const DeviceLayer other(odd, {.max_tokens = 4096});
  EXPECT_FALSE(row_of(other).chosen);
  EXPECT_NE(row_of(other).reason.find("multiple of 32"), std::string::npos);
}

}  // namespace
}  // namespace conclave
