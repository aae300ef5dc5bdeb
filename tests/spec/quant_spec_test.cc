#include "core/part_spec.h"

#include "conclave/error.h"
#include "conclave/spec.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

MoeSpec quantised(WeightScale weights, ActivationScale activations = ActivationScale::kNone) {
  MoeSpec spec;
  spec.num_experts = 4;
  spec.top_k = 2;
  spec.hidden_size = 300;
  spec.intermediate_size = 130;
  spec.weight_dtype = DType::kF8E4M3;
  spec.quant = {.weights = weights, .activations = activations};
  return spec;
}

void expect_refused(const MoeSpec& spec, ErrorCode code, const std::string& field) {
  try {
    validate(spec);
    ADD_FAILURE() << field << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_NE(error.detail().what.find(field), std::string::npos) << error.what();
    EXPECT_FALSE(error.detail().found.empty());
  }
}

TEST(QuantSpec, EveryForm_IsAccepted) {
  for (const WeightScale weights :
       {WeightScale::kTensor, WeightScale::kChannel, WeightScale::kBlock}) {
    for (const ActivationScale activations :
         {ActivationScale::kNone, ActivationScale::kTensorStatic, ActivationScale::kToken,
          ActivationScale::kGroup}) {
      EXPECT_NO_THROW(validate(quantised(weights, activations)));
    }
  }
}

TEST(QuantSpec, E4m3WithoutScales_IsRefused) {
  expect_refused(quantised(WeightScale::kNone), ErrorCode::kInvalidArgument, "quant.weights");
}

TEST(QuantSpec, ScalesWithoutE4m3_AreRefused) {
  MoeSpec spec = quantised(WeightScale::kBlock);
  spec.weight_dtype = DType::kBF16;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.weights");
  spec.quant = {.activations = ActivationScale::kToken};
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activations");
}

TEST(QuantSpec, ValuesOutOfRange_AreRefused) {
  MoeSpec spec = quantised(WeightScale::kBlock);
  spec.quant.block_rows = 0;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.block_rows");
  spec.quant.block_rows = 128;
  spec.quant.block_cols = -128;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.block_cols");
  spec = quantised(WeightScale::kTensor);
  spec.quant.block_cols = 64;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.block_cols");
  spec = quantised(WeightScale::kTensor, ActivationScale::kGroup);
  for (const int64_t group : {int64_t{1}, int64_t{32}, kMaxSpecSize}) {
    spec.quant.activation_group = group;
    EXPECT_NO_THROW(validate(spec)) << group;
  }
  for (const int64_t group : {int64_t{0}, int64_t{-32}, kMaxSpecSize + 1}) {
    spec.quant.activation_group = group;
    expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_group");
  }
  spec = quantised(WeightScale::kTensor, ActivationScale::kToken);
  spec.quant.activation_group = 32;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_group");
  spec = quantised(WeightScale::kTensor, ActivationScale::kTensorStatic);
  spec.quant.power_of_two_scales = true;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.power_of_two_scales");
  spec = quantised(WeightScale::kTensor);
  spec.quant.weights = static_cast<WeightScale>(9);
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.weights");
}

TEST(QuantSpec, Int8Rows_GoBesideWholeNumbers) {
  for (const DType weights : {DType::kI8, DType::kI4, DType::kF4, DType::kIQ4, DType::kU4}) {
    MoeSpec spec = quantised(WeightScale::kChannel);
    spec.weight_dtype = weights;
    const bool needs_zeros = weights == DType::kU4;
    if (needs_zeros) spec.quant.zeros = WeightZero::kOffset;
    const MoeSpec coded = with_int8_rows(spec);
    EXPECT_EQ(coded.quant.activations, ActivationScale::kGroup);
    EXPECT_EQ(coded.quant.activation_group, 32);
    EXPECT_EQ(coded.quant.activation_dtype, DType::kI8);
    EXPECT_NO_THROW(validate(coded));
    EXPECT_THROW(with_int8_rows(coded), Error) << "rows are codes already";
    spec.quant.zeros = WeightZero::kPoint;
    EXPECT_NO_THROW(validate(with_int8_rows(spec)));
    if (!needs_zeros) spec.quant.zeros = WeightZero::kNone;
    spec.quant.has_column_order = true;
    EXPECT_THROW(with_int8_rows(spec), Error);
    spec.quant.has_column_order = false;
    spec.quant.activation_dtype = DType::kI8;
    expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_dtype");
  }
  for (const DType weights : {DType::kF8E4M3, DType::kNF4, DType::kBnbFP4, DType::kF8E5M2}) {
    MoeSpec spec = quantised(WeightScale::kChannel);
    spec.weight_dtype = weights;
    EXPECT_THROW(with_int8_rows(spec), Error);
    spec.quant.activations = ActivationScale::kGroup;
    spec.quant.activation_dtype = DType::kI8;
    expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_dtype");
    spec.quant.activation_dtype = DType::kF8E4M3;
    EXPECT_NO_THROW(validate(spec));
  }
  MoeSpec plain = quantised(WeightScale::kChannel);
  plain.weight_dtype = DType::kBF16;
  plain.quant = {};
  EXPECT_THROW(with_int8_rows(plain), Error);
}

TEST(QuantSpec, E4m3Rows_GoBesideAllCodesWithoutZeros) {
  for (const DType weights : {DType::kI8, DType::kI4, DType::kIQ4, DType::kF4, DType::kNF4}) {
    for (const ActivationScale rows :
         {ActivationScale::kTensorStatic, ActivationScale::kToken, ActivationScale::kGroup}) {
      MoeSpec spec = quantised(WeightScale::kChannel, rows);
      spec.weight_dtype = weights;
      spec.quant.activation_dtype = DType::kF8E4M3;
      EXPECT_NO_THROW(validate(spec)) << to_string(weights);
      spec.quant.zeros = WeightZero::kPoint;
      expect_refused(spec, ErrorCode::kInvalidArgument, "quant.zeros");
      spec.quant.zeros = WeightZero::kNone;
      spec.quant.activation_dtype = DType::kF8E5M2;
      expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_dtype");
    }
  }
}

TEST(QuantSpec, KnownCodes_AreLessThanTheLayersForm) {
  MoeSpec spec = quantised(WeightScale::kBlock);
  spec.weight_dtype = DType::kI8;
  spec.quant.block_rows = 1;
  spec.quant.block_cols = 16;
  spec.quant.zeros = WeightZero::kOffset;
  const auto refused = [&](const MatrixCodes& known, const std::string& member) {
    for (const bool of_down : {false, true}) {
      MoeSpec other = spec;
      (of_down ? other.quant.down_codes : other.quant.gate_up_codes) = known;
      expect_refused(other, ErrorCode::kInvalidArgument,
                     std::string("quant.") + (of_down ? "down_codes" : "gate_up_codes") + member);
    }
  };
  for (const DType type : {DType::kI4, DType::kU4, DType::kIQ4, DType::kI6, DType::kU2}) {
    spec.quant.gate_up_codes.dtype = type;
    EXPECT_NO_THROW(validate(spec)) << to_string(type);
  }
  MoeSpec packed = spec;
  packed.quant.gate_up_codes = {};
  for (const DType type : {DType::kI6, DType::kU2}) {
    packed.weight_dtype = type;
    expect_refused(packed, ErrorCode::kDType, "weight_dtype");
  }
  for (const DType type : {DType::kI8, DType::kF8E4M3, DType::kF4, DType::kNF4, DType::kBF16}) {
    refused({.dtype = type}, ".dtype");
  }
  spec.quant.gate_up_codes = {.block_cols = 48, .has_zeros = false};
  EXPECT_NO_THROW(validate(spec));
  for (const int64_t cols : {int64_t{-16}, int64_t{8}, int64_t{24}, kMaxSpecSize + 16}) {
    refused({.block_cols = cols}, ".block_cols");
  }
  spec.quant.gate_up_codes = {.scale_values = ScaleValues::kSteps,
                              .zero_values = ScaleValues::kF16};
  EXPECT_NO_THROW(validate(spec));
  refused({.block_cols = 48, .scale_values = ScaleValues::kSteps}, "");
  refused({.scale_values = static_cast<ScaleValues>(9)}, ".scale_values");
  refused({.has_zeros = false, .zero_values = ScaleValues::kF16}, ".zero_values");
  spec.quant.gate_up_codes = {};
  spec.quant.zeros = WeightZero::kNone;
  refused({.has_zeros = false}, ".has_zeros");
  refused({.zero_values = ScaleValues::kF16}, ".zero_values");
  spec.quant.block_rows = 2;
  refused({.block_cols = 32}, ".block_cols");
  MoeSpec plain = quantised(WeightScale::kBlock);
  plain.weight_dtype = DType::kBF16;
  plain.quant = {.down_codes = {.dtype = DType::kI4}};
  expect_refused(plain, ErrorCode::kInvalidArgument, "quant.down_codes");
}

TEST(QuantSpec, ScaleRules_AreForGroupsOfFloats) {
  MoeSpec spec = quantised(WeightScale::kBlock, ActivationScale::kGroup);
  for (const RowScaleRule rule :
       {RowScaleRule::kFloorPower, RowScaleRule::kEvenPower, RowScaleRule::kHalfPower,
        RowScaleRule::kCeilPower, RowScaleRule::kTwoLevel}) {
    spec.quant.activation_scale_rule = rule;
    spec.quant.activation_dtype.reset();
    EXPECT_NO_THROW(validate(spec)) << "e4m3";
    for (const DType rows : {DType::kF4, DType::kF6E2M3, DType::kF6E3M2, DType::kF8E5M2}) {
      spec.quant.activation_dtype = rows;
      EXPECT_NO_THROW(validate(spec)) << to_string(rows);
    }
    for (const DType rows : {DType::kI8, DType::kI4, DType::kNF4, DType::kBF16}) {
      spec.quant.activation_dtype = rows;
      expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_dtype");
    }
  }
  spec.quant.activation_dtype = DType::kF4;
  spec.quant.power_of_two_scales = true;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.power_of_two_scales");
  spec.quant.power_of_two_scales = false;
  spec.quant.activation_scale_rule = RowScaleRule::kQuotient;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_dtype");
  spec.quant.activation_scale_rule = static_cast<RowScaleRule>(6);
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_scale_rule");
  for (const ActivationScale rows :
       {ActivationScale::kNone, ActivationScale::kTensorStatic, ActivationScale::kToken}) {
    spec = quantised(WeightScale::kBlock, rows);
    spec.quant.activation_scale_rule = RowScaleRule::kEvenPower;
    expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_scale_rule");
  }
  // Rows beside integers are integers unless the spec says otherwise.
  spec = quantised(WeightScale::kBlock, ActivationScale::kGroup);
  spec.weight_dtype = DType::kI8;
  spec.quant.activation_scale_rule = RowScaleRule::kEvenPower;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.activation_dtype");
  spec.quant.activation_dtype = DType::kF8E4M3;
  EXPECT_NO_THROW(validate(spec));
}

TEST(QuantSpec, WithPlainRows_LeavesOnlyRowsOut) {
  MoeSpec spec = quantised(WeightScale::kBlock, ActivationScale::kGroup);
  const MoeSpec plain = quantised(WeightScale::kBlock);
  spec.quant.power_of_two_scales = true;
  EXPECT_EQ(with_plain_rows(spec).quant, plain.quant);
  spec.quant.power_of_two_scales = false;
  spec.quant.activation_group = 16;
  spec.quant.activation_dtype = DType::kF4;
  spec.quant.activation_scale_rule = RowScaleRule::kTwoLevel;
  EXPECT_EQ(with_plain_rows(spec).quant, plain.quant);
  EXPECT_EQ(with_plain_rows(plain).quant, plain.quant);
}

TEST(QuantSpec, Zeros_GoBesidePlainRowsAndRowsOfWholeNumbers) {
  for (const WeightScale weights :
       {WeightScale::kTensor, WeightScale::kChannel, WeightScale::kBlock}) {
    for (const WeightZero zeros : {WeightZero::kPoint, WeightZero::kOffset}) {
      MoeSpec spec = quantised(weights);
      spec.quant.zeros = zeros;
      EXPECT_NO_THROW(validate(spec));
      spec.quant.activations = ActivationScale::kToken;
      expect_refused(spec, ErrorCode::kInvalidArgument, "quant.zeros");
      spec.weight_dtype = DType::kI8;
      EXPECT_NO_THROW(validate(spec));
    }
  }
  MoeSpec spec = quantised(WeightScale::kBlock);
  spec.quant.zeros = static_cast<WeightZero>(3);
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.zeros");
}

TEST(QuantSpec, GlobalScalesAndFactors_GoWithEveryForm) {
  for (const WeightScale weights :
       {WeightScale::kTensor, WeightScale::kChannel, WeightScale::kBlock}) {
    MoeSpec spec = quantised(weights, ActivationScale::kToken);
    spec.quant.has_global_scale = spec.quant.has_column_factors = true;
    EXPECT_NO_THROW(validate(spec));
  }
}

TEST(QuantSpec, ColumnOrders_AreForGroupsOfARowAndPlainRows) {
  MoeSpec spec = quantised(WeightScale::kBlock);
  spec.quant.has_column_order = true;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.has_column_order");
  spec.quant.block_rows = 1;
  EXPECT_NO_THROW(validate(spec));
  spec.quant.activations = ActivationScale::kGroup;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.has_column_order");
  spec = quantised(WeightScale::kChannel);
  spec.quant.has_column_order = true;
  expect_refused(spec, ErrorCode::kInvalidArgument, "quant.has_column_order");
}

TEST(QuantSpec, MeaningsOfCodes_AreRefusedForPlainWeights) {
  MoeSpec plain = quantised(WeightScale::kBlock);
  plain.weight_dtype = DType::kBF16;
  plain.quant = {};
  const auto refused = [&](const QuantSpec& quant, const char* field) {
    MoeSpec spec = plain;
    spec.quant = quant;
    expect_refused(spec, ErrorCode::kInvalidArgument, field);
  };
  refused({.zeros = WeightZero::kPoint}, "quant.zeros");
  refused({.has_global_scale = true}, "quant.has_global_scale");
  refused({.has_column_order = true}, "quant.has_column_order");
  refused({.has_column_factors = true}, "quant.has_column_factors");
}

TEST(QuantSpec, OtherTypes_AreRefused) {
  MoeSpec spec = quantised(WeightScale::kTensor);
  spec.weight_dtype = DType::kF8E5M2Fnuz;
  expect_refused(spec, ErrorCode::kDType, "weight_dtype");
  spec = quantised(WeightScale::kTensor);
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 40};
  spec.shared.weight_dtype = DType::kI8;
  expect_refused(spec, ErrorCode::kDType, "shared.weight_dtype");
  spec.shared.weight_dtype = DType::kBF16;
  EXPECT_NO_THROW(validate(spec));
  spec.weight_dtype = DType::kBF16;
  spec.quant = {};
  spec.shared.weight_dtype = DType::kF8E4M3;
  expect_refused(spec, ErrorCode::kDType, "shared.weight_dtype");
  spec = quantised(WeightScale::kTensor);
  spec.residual.intermediate_size = 32;
  expect_refused(spec, ErrorCode::kDType, "residual.weight_dtype");
  spec.residual.weight_dtype = DType::kF16;
  EXPECT_NO_THROW(validate(spec));
}

TEST(QuantSpec, TypeOfAbsentParts_IsRefused) {
  MoeSpec spec = quantised(WeightScale::kTensor);
  spec.shared.weight_dtype = DType::kBF16;
  expect_refused(spec, ErrorCode::kInvalidArgument, "shared.weight_dtype");
  spec = quantised(WeightScale::kTensor);
  spec.residual.weight_dtype = DType::kBF16;
  expect_refused(spec, ErrorCode::kInvalidArgument, "residual.weight_dtype");
}

TEST(CountParameters, WhatGivesCodesAMeaning_IsNotCounted) {
  MoeSpec plain = quantised(WeightScale::kBlock);
  plain.quant.block_rows = 1;
  plain.quant.zeros = WeightZero::kPoint;
  plain.quant.has_global_scale = plain.quant.has_column_order = true;
  plain.quant.has_column_factors = true;
  const int64_t quantised_count = count_parameters(plain).total;
  plain.weight_dtype = DType::kBF16;
  plain.quant = {};
  EXPECT_EQ(quantised_count, count_parameters(plain).total);
}

}  // namespace
}  // namespace conclave
