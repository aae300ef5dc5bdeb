// Compares layers on a GPU, whose weights bf16 holds, with float64: every scale with every code.
#include "device_layer.h"
#include "layer/cuda/few_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace conclave {
namespace {

using testing::copy_rows;
using testing::CudaLayerTest;
using testing::DeviceLayer;
using testing::make_spec;
using testing::one_launch_table;

class CudaExactScales : public CudaLayerTest {};

// Scales of down of every byte, for all codes: token t activates the columns that share scale t, so
// that its result has one scale. Gate and up are ones there, and zeros elsewhere.
class EveryScale final : public WeightSource {
 public:
  EveryScale(std::unique_ptr<WeightSource> inner, int64_t columns, uint8_t first, uint8_t one)
      : inner_(std::move(inner)), columns_(columns), first_(first), one_(one) {}

  WeightInfo describe(WeightId id) const override { return inner_->describe(id); }
  std::string locate(WeightId id, int64_t expert) const override {
    return inner_->locate(id, expert);
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner_->read(id, expert, block, destination);
    if (!id.mlp()) return;
    const bool is_down = id.matrix() == WeightMatrix::kDown;
    if (id.plane() == WeightPlane::kScale) {
      const int64_t width = block.col_end - block.col_begin;
      for (size_t i = 0; i < destination.size(); ++i) {
        const int64_t group = block.col_begin + static_cast<int64_t>(i) % width;
        destination[i] = static_cast<std::byte>(is_down ? first_ + group : one_);
      }
    }
    if (id.plane() != WeightPlane::kWeights || is_down) return;
    constexpr uint8_t kOne = 2;  // the code of 1
    std::ranges::fill(destination, std::byte{0});
    const int64_t width = (block.col_end - block.col_begin + 1) / 2;
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      const int64_t column = row / columns_ - block.col_begin;
      if (column < 0 || column >= block.col_end - block.col_begin) continue;
      destination[static_cast<size_t>((row - block.row_begin) * width + column / 2)] =
          static_cast<std::byte>(kOne << (column % 2 * 4));
    }
  }

 private:
  std::unique_ptr<WeightSource> inner_;
  int64_t columns_;
  uint8_t first_;
  uint8_t one_;
};

// The bytes of scales of a kind. The least and the largest powers would leave what float32 has.
struct BytesOfScales {
  ScaleValues values;
  int64_t columns;
  uint8_t first;
  uint8_t last;
  uint8_t one;
};
constexpr BytesOfScales kBytesOfScales[] = {{ScaleValues::kPowerOfTwo, 32, 8, 245, 127},
                                            {ScaleValues::kPowerOfTwo, 32, 60, 192, 127},
                                            {ScaleValues::kFloat8, 16, 1, 126, 0x38},
                                            {ScaleValues::kFloat8, 16, 0, 126, 0x38}};

// Tokens of a layer each of which meets one scale.
class ScalesOneByOne {
 public:
  explicit ScalesOneByOne(const BytesOfScales& scales)
      : scales_(scales), tokens_(scales.last - scales.first + 1) {
    spec_ = make_spec(2, 1, tokens_ + 3, tokens_ * scales.columns, DType::kF4);
    spec_.quant = {.weights = WeightScale::kBlock,
                   .block_rows = 1,
                   .block_cols = scales.columns,
                   .scale_values = scales.values,
                   .has_global_scale = scales.values == ScaleValues::kFloat8};
    hidden_ = Tensor(DType::kBF16, {tokens_, spec_.hidden_size});
    const std::span values(hidden_.as<uint16_t>(),
                           static_cast<size_t>(tokens_ * spec_.hidden_size));
    std::ranges::fill(values, uint16_t{0});
    for (int64_t token = 0; token < tokens_; ++token) {
      values[static_cast<size_t>(token * spec_.hidden_size + token)] = 0x3f80;  // 1
    }
  }

  const MoeSpec& spec() const { return spec_; }
  int64_t tokens() const { return tokens_; }
  DeviceLayer layer(const LayerOptions& options) const {
    return {spec_,
            std::make_unique<EveryScale>(make_synthetic_source(spec_, 5), scales_.columns,
                                         scales_.first, scales_.one),
            options};
  }
  void expect_exact(DeviceLayer& owned, int64_t begin, int64_t count) const {
    const Tensor rows = copy_rows(hidden_, begin, count);
    const testing::LayerOutput output = testing::run_device_layer(owned, rows.view(), DType::kBF16);
    const StageCheck check =
        check_against_reference(owned.host, spec_, *owned.source, output.result(rows.const_view()));
    EXPECT_LE(check.worst_token_error, accuracy_bar(spec_.weight_dtype, DType::kBF16)) << begin;
  }

 private:
  BytesOfScales scales_;
  int64_t tokens_;
  MoeSpec spec_;
  Tensor hidden_;
};

void expect_exact_scales(const char* kernel) {
  for (const BytesOfScales& scales : kBytesOfScales) {
    SCOPED_TRACE(::testing::Message() << scales.columns << " from " << int{scales.first});
    const ScalesOneByOne all(scales);
    DeviceLayer owned = all.layer({.max_tokens = all.tokens(), .kernel = kernel});
    all.expect_exact(owned, 0, all.tokens());
    all.expect_exact(owned, 0, 5);
  }
}

TEST_F(CudaExactScales, EveryScaleOfAByte_IsExactInStreamedKernels) {
  expect_exact_scales("cuda.stream_codes_sm90");
}
TEST_F(CudaExactScales, EveryScaleOfAByte_IsExactInKernelsOfManyRows) {
  expect_exact_scales("cuda.tile_codes_sm90");
}
TEST_F(CudaExactScales, EveryScaleOfAByte_IsExactInThePlainKernel) {
  expect_exact_scales("cuda.reference");
}
TEST_F(CudaExactScales, EveryScaleOfAByte_IsExactInOneLaunch) {
  for (const BytesOfScales& scales : kBytesOfScales) {
    SCOPED_TRACE(::testing::Message() << scales.columns << " from " << int{scales.first});
    const ScalesOneByOne all(scales);
    DeviceLayer owned = all.layer({.max_tokens = 8, .tuning = one_launch_table(all.spec())});
    for (int64_t begin = 0; begin < all.tokens(); begin += 8) {
      all.expect_exact(owned, begin, std::min<int64_t>(8, all.tokens() - begin));
    }
  }
}

// Down's scales are float32 numbers that no narrower type has.
class ThirdsAsScales final : public WeightSource {
 public:
  explicit ThirdsAsScales(std::unique_ptr<WeightSource> inner) : inner_(std::move(inner)) {}

  WeightInfo describe(WeightId id) const override {
    WeightInfo info = inner_->describe(id);
    if (id == kScales) info.dtype = DType::kF32;
    return info;
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (id != kScales) return inner_->read(id, expert, block, destination);
    const float third = 1.0F / 3.0F;
    for (size_t at = 0; at < destination.size(); at += sizeof(float)) {
      std::memcpy(destination.data() + at, &third, sizeof(float));
    }
  }
  std::string locate(WeightId id, int64_t) const override {
    return id == kScales ? "thirds" : "others";
  }

 private:
  static constexpr WeightId kScales = weights::kDown.with(WeightPlane::kScale);
  std::unique_ptr<WeightSource> inner_;
};

TEST_F(CudaExactScales, ScaleThatBreaksThePromise_IsRefusedByName) {
  for (const auto& [values, columns] :
       {std::pair{ScaleValues::kPowerOfTwo, 32}, std::pair{ScaleValues::kFloat8, 16}}) {
    MoeSpec spec = make_spec(3, 2, 128, 64, DType::kF4);
    spec.quant = {.weights = WeightScale::kBlock,
                  .block_rows = 1,
                  .block_cols = columns,
                  .scale_values = values};
    try {
      const DeviceLayer refused(spec,
                                std::make_unique<ThirdsAsScales>(make_synthetic_source(spec, 5)));
      ADD_FAILURE() << columns;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTensorValue);
      EXPECT_EQ(error.detail().tensor, "thirds");
    }
  }
}

}  // namespace
}  // namespace conclave
