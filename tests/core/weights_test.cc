#include "conclave/weights.h"

#include "core/workspace_layout.h"

#include "conclave/error.h"
#include "conclave/synthetic.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace conclave {
namespace {

constexpr int64_t kExperts = 3;
constexpr int64_t kHidden = 5;
constexpr int64_t kInner = 4;

class PointerSource : public ::testing::Test {
 protected:
  PointerSource()
      : gate_up_(DType::kF32, {kExperts, 2 * kInner, kHidden}),
        down_(DType::kF32, {kExperts, kHidden, kInner}) {
    std::iota(gate_up_.as<float>(), gate_up_.as<float>() + kExperts * 2 * kInner * kHidden, 1.0F);
    std::iota(down_.as<float>(), down_.as<float>() + kExperts * kInner * kHidden, 1000.0F);
  }
  ExpertWeights weights() { return {.gate_up = gate_up_.const_view(), .down = down_.const_view()}; }
  ErrorCode rejection(const ExpertWeights& weights) {
    try {
      make_pointer_source(weights);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode{0};
  }
  Tensor gate_up_;
  Tensor down_;
};

TEST_F(PointerSource, GateAndUp_AreTheHalvesOfGateUp) {
  const auto source = make_pointer_source(weights());
  const auto* gate = static_cast<const float*>(source->view(weights::kGate, 2).data);
  const auto* up = static_cast<const float*>(source->view(weights::kUp, 2).data);
  EXPECT_EQ(gate, gate_up_.as<float>() + 2 * 2 * kInner * kHidden);
  EXPECT_EQ(up, gate + kInner * kHidden);
  EXPECT_EQ(source->describe(weights::kDown).rows, kHidden);
  EXPECT_EQ(source->describe(weights::kRouter).count, 0);
}

TEST_F(PointerSource, ReadOfABlock_IsDense) {
  const auto source = make_pointer_source(weights());
  std::vector<float> block(4);
  source->read(weights::kDown, 1, {.row_begin = 1, .row_end = 3, .col_begin = 2, .col_end = 4},
               std::as_writable_bytes(std::span(block)));
  const float* matrix = down_.as<float>() + kHidden * kInner;
  EXPECT_EQ(block, (std::vector<float>{matrix[6], matrix[7], matrix[10], matrix[11]}));
}

TEST_F(PointerSource, BadInput_IsRejectedByCode) {
  ExpertWeights null = weights();
  null.down.data = nullptr;
  EXPECT_EQ(rejection(null), ErrorCode::kNullPointer);
  ExpertWeights mixed = weights();
  mixed.down.dtype = DType::kI32;
  EXPECT_EQ(rejection(mixed), ErrorCode::kDType);
  ExpertWeights unknown = weights();
  unknown.gate_up.dtype = static_cast<DType>(99);
  EXPECT_EQ(rejection(unknown), ErrorCode::kDType);
  ExpertWeights shaped = weights();
  shaped.gate_up.shape = {kExperts, kInner, kHidden};
  EXPECT_EQ(rejection(shaped), ErrorCode::kShape);
  ExpertWeights misaligned = weights();
  misaligned.down.data = static_cast<const std::byte*>(misaligned.down.data) + 1;
  EXPECT_EQ(rejection(misaligned), ErrorCode::kMisaligned);
  const auto source = make_pointer_source(weights());
  EXPECT_THROW(static_cast<void>(source->view(weights::kGate, kExperts)), Error);
  EXPECT_THROW(static_cast<void>(source->view(weights::kRouter, 0)), Error);
}

TEST(SyntheticSource, AnyBlock_EqualsThatPartOfTheWhole) {
  MoeSpec spec;
  spec.num_experts = 2;
  spec.top_k = 1;
  spec.hidden_size = 7;
  spec.intermediate_size = 9;
  const auto source = make_synthetic_source(spec, 5);
  std::vector<uint16_t> whole(9 * 7);
  source->read(weights::kUp, 1, {0, 9, 0, 7}, std::as_writable_bytes(std::span(whole)));
  std::vector<uint16_t> block(2 * 3);
  source->read(weights::kUp, 1, {4, 6, 2, 5}, std::as_writable_bytes(std::span(block)));
  for (size_t row = 0; row < 2; ++row) {
    for (size_t col = 0; col < 3; ++col) {
      EXPECT_EQ(block[row * 3 + col], whole[(4 + row) * 7 + 2 + col]);
    }
  }
  std::vector<uint16_t> other(9 * 7);
  source->read(weights::kUp, 0, {0, 9, 0, 7}, std::as_writable_bytes(std::span(other)));
  EXPECT_NE(whole, other);
  for (const uint16_t bits : whole) EXPECT_NE(bits & 0x7fff, 0) << "never zero";
}

// FNV-1a of all weights, in the order of their names.
uint64_t digest(const WeightSource& source) {
  std::map<std::string, WeightId> ids;
  for (const WeightId id : weights::kAll) ids.emplace(to_string(id), id);
  uint64_t value = 0xcbf29ce484222325;
  for (const auto& [name, id] : ids) {
    const WeightInfo info = source.describe(id);
    const int64_t row_bytes = (info.cols * bit_size(info.dtype) + 7) / 8;
    std::vector<std::byte> bytes(static_cast<size_t>(info.rows * row_bytes));
    for (int64_t expert = 0; expert < info.count; ++expert) {
      source.read(id, expert, {0, info.rows, 0, info.cols}, bytes);
      for (const std::byte byte : bytes) {
        value = (value ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
      }
    }
  }
  return value;
}

// Recorded results of benchmarks and examples name a seed and nothing else.
TEST(SyntheticSource, Seed_GoesOnToMeanTheSameLayer) {
  MoeSpec spec;
  spec.num_experts = 3;
  spec.top_k = 2;
  spec.hidden_size = 64;
  spec.intermediate_size = 40;
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 24, .has_bias = true};
  spec.latent = {.size = 32, .has_norm = true};
  spec.residual = {.intermediate_size = 20, .weight_dtype = DType::kF16};
  spec.router.has_selection_bias = true;
  spec.router.has_expert_scale = true;
  spec.router.has_global_scale = true;
  spec.router.has_logit_bias = true;
  spec.router.input_norm.enabled = true;
  EXPECT_EQ(digest(*make_synthetic_source(spec, 7)), 0x97f655e5602ef753U);
  spec.shared.mode = SharedMode::kSoftmaxMix;
  spec.weight_dtype = DType::kF8E4M3;
  spec.quant = {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic};
  EXPECT_EQ(digest(*make_synthetic_source(spec, 7)), 0x47c04692344cf070U);
}

TEST(FillRandom, Values_HaveUnitVariance) {
  Tensor tensor(DType::kF32, {64, 64});
  fill_random(tensor.view(), 3);
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < 4096; ++i) {
    sum += tensor.as<float>()[i];
    squares += static_cast<double>(tensor.as<float>()[i]) * tensor.as<float>()[i];
  }
  // The bars are four standard errors of a mean and of a variance over 4096 draws.
  EXPECT_LT(std::abs(sum / 4096), 4.0 / 64);
  EXPECT_LT(std::abs(squares / 4096 - 1.0), 4.0 * 1.5 / 64);
}

TEST(WorkspaceLayout, Slices_AreAlignedAndDisjoint) {
  WorkspaceLayout layout;
  const WorkspaceSlice first = layout.book<float>(3);
  const WorkspaceSlice second = layout.book<int64_t>(0);
  const WorkspaceSlice third = layout.book<int64_t>(9);
  EXPECT_EQ(first.offset % kWorkspaceAlignment, 0U);
  EXPECT_GE(second.offset, first.offset + first.bytes);
  EXPECT_GE(third.offset, second.offset);
  EXPECT_EQ(third.offset % kWorkspaceAlignment, 0U);
  EXPECT_GE(layout.total_bytes(), third.offset + third.bytes);
  EXPECT_THROW(layout.book<double>(INT64_MAX / 4), Error);
  EXPECT_THROW(layout.book<double>(-1), Error);
}

}  // namespace
}  // namespace conclave
