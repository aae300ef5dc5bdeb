// Forms of codes that kernels of a GPU tell apart.
#pragma once

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <vector>

namespace conclave::testing {

// Codes, and their factors in each form that kernels for tensor cores read.
struct CodedForm {
  const char* name;
  DType dtype;
  QuantSpec quant;
};
inline std::vector<CodedForm> coded_forms() {
  const auto groups = [](int64_t columns, WeightZero zeros = WeightZero::kNone) {
    return QuantSpec{
        .weights = WeightScale::kBlock, .block_rows = 1, .block_cols = columns, .zeros = zeros};
  };
  QuantSpec mxfp4 = groups(32);
  mxfp4.scale_values = ScaleValues::kPowerOfTwo;
  QuantSpec nvfp4 = groups(16);
  nvfp4.scale_values = ScaleValues::kFloat8;
  nvfp4.has_global_scale = true;
  QuantSpec steps = groups(32, WeightZero::kOffset);
  steps.scale_values = steps.zero_values = ScaleValues::kSteps;
  QuantSpec scale_steps = groups(16);
  scale_steps.scale_values = ScaleValues::kSteps;
  QuantSpec fine_steps = groups(16, WeightZero::kOffset);
  fine_steps.scale_values = fine_steps.zero_values = ScaleValues::kSteps;
  return {{"int4, 32 columns", DType::kI4, groups(32)},
          {"int4, 64 columns, zero points", DType::kI4, groups(64, WeightZero::kPoint)},
          {"int4, 128 columns", DType::kI4, groups(128)},
          {"int4, 512 columns, zero points", DType::kI4, groups(512, WeightZero::kPoint)},
          {"int4, rows", DType::kI4, {.weights = WeightScale::kChannel}},
          {"int4, 96 columns", DType::kI4, groups(96)},
          {"int4, 32 columns, offsets", DType::kI4, groups(32, WeightZero::kOffset)},
          {"int4, 16 columns, offsets", DType::kI4, groups(16, WeightZero::kOffset)},
          {"int4, 16 columns, zero points", DType::kI4, groups(16, WeightZero::kPoint)},
          {"int4, rows, offsets",
           DType::kI4,
           {.weights = WeightScale::kChannel, .zeros = WeightZero::kOffset}},
          {"nf4, 64 columns", DType::kNF4, groups(64)},
          {"nf4, 16 columns", DType::kNF4, groups(16)},
          {"nf4, 32 columns", DType::kNF4, groups(32)},
          {"fp4 of bitsandbytes, rows", DType::kBnbFP4, {.weights = WeightScale::kChannel}},
          {"fp4 of bitsandbytes, 64 columns", DType::kBnbFP4, groups(64)},
          {"iq4, 32 columns", DType::kIQ4, groups(32)},
          {"int4, rows, zero points",
           DType::kI4,
           {.weights = WeightScale::kChannel, .zeros = WeightZero::kPoint}},
          {"uint4, 128 columns, zero points", DType::kU4, groups(128, WeightZero::kPoint)},
          {"uint4, 32 columns, zero points", DType::kU4, groups(32, WeightZero::kPoint)},
          {"uint4, 32 columns, offsets", DType::kU4, groups(32, WeightZero::kOffset)},
          {"uint4, 32 columns, steps", DType::kU4, steps},
          {"int4, 16 columns, steps", DType::kI4, scale_steps},
          {"int4, 16 columns, steps of offsets", DType::kI4, fine_steps},
          {"iq4, 16 columns", DType::kIQ4, groups(16)},
          {"e2m1, 16 columns", DType::kF4, groups(16)},
          {"e2m1, 64 columns", DType::kF4, groups(64)},
          {"mxfp4", DType::kF4, mxfp4},
          {"nvfp4", DType::kF4, nvfp4},
          {"int8, 32 columns, zero points", DType::kI8, groups(32, WeightZero::kPoint)},
          {"int8, rows", DType::kI8, {.weights = WeightScale::kChannel}},
          {"int8, rows, zero points",
           DType::kI8,
           {.weights = WeightScale::kChannel, .zeros = WeightZero::kPoint}},
          {"int8, 32 columns", DType::kI8, groups(32)},
          {"int8, 128 columns", DType::kI8, groups(128)},
          {"int8, 16 columns", DType::kI8, groups(16)},
          {"int8, 16 columns, steps", DType::kI8, scale_steps},
          {"int8, 32 columns, steps", DType::kI8, steps},
          {"int8, 16 columns, offsets", DType::kI8, groups(16, WeightZero::kOffset)},
          {"int8, 32 columns, offsets", DType::kI8, groups(32, WeightZero::kOffset)},
          {"int8, 64 columns, offsets", DType::kI8, groups(64, WeightZero::kOffset)},
          {"int8, 256 columns, offsets", DType::kI8, groups(256, WeightZero::kOffset)},
          {"e4m3, 128 columns, zero points", DType::kF8E4M3, groups(128, WeightZero::kPoint)},
          {"e4m3, blocks", DType::kF8E4M3, {.weights = WeightScale::kBlock}},
          {"e4m3, 64 columns", DType::kF8E4M3, groups(64)},
          {"e5m2, one scale", DType::kF8E5M2, {.weights = WeightScale::kTensor}}};
}

}  // namespace conclave::testing
