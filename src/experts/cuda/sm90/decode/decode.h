// Launch of the decode kernel.
#pragma once

#include "activation/device/device_activation.h"
#include "experts/cuda/one_launch.h"
#include "experts/cuda/sm90/code_values.h"
#include "experts/cuda/sm90/decode/plan.h"

#include <cuda.h>

namespace conclave::inline v0::experts {

// The part that shares a step when rows are quantised: 128 columns, a row, or all rows.
enum class RowScale : uint8_t { kGroup, kToken, kStatic };

struct DecodeParams {
  CUtensorMap up_map;    // boxes of 16 rows
  CUtensorMap down_map;  // boxes of pass_rows rows
  // Factors of weights that are codes: scales, and zero points or offsets; or steps of both and
  // their units.
  CUtensorMap up_scales;
  CUtensorMap up_seconds;
  CUtensorMap down_scales;
  CUtensorMap down_seconds;
  int32_t second_bytes = 0;  // a zero point or offset has; 0 if there are none
  DecodePlan plan;
  DecodeShared shared;
  DeviceExperts weights;
  OneLaunchCall call;
  activation::DeviceActivation activation;
  RowScale row_scale = RowScale::kGroup;
  bool power_of_two_scales = false;
  Bf16Values values;  // for kernels that take a table
  int32_t least = 0;  // the value of code 0, for codes in order
};

enum class DecodeElement : uint8_t {
  kBF16,
  kF16,
  kE4M3Block,  // e4m3 rows too
  kE4M3Row,
  kInt8Row,  // int8 rows by token
  // Codes of 4 or 8 bits beside bf16 rows, with scales and zero points, or offsets.
  kCodes4,
  kCodes4InOrder,  // they stand for whole numbers in their order
  kCodes4InOrderOffsets,
  kCodes4InOrderSteps,  // FactorForm::kSteps of 32 columns
  kCodes4Offsets,
  kCodes4InPairs,  // CodeOrder::kLanesOfPairs
  kCodes4PairsInTerms,
  kCodes4Terms,   // takes_two_terms
  kCodes4Powers,  // FactorForm::kExact, with scales that are powers of two
  kCodes4Floats,  // the same beside scales of e4m3
  kCodes8,
  kWholes8,  // takes_whole_bytes
  kCodes8Offsets,
  kCodes8Steps,        // FactorForm::kScaleSteps
  kCodes8OffsetSteps,  // FactorForm::kSteps
  kCodes4TimesSteps,   // multiplies_steps, without offsets and with them
  kCodes4TimesOffsetSteps,
  kCodes2,  // CodeOrder::kLanesOfSmallNumbers
};

// Called once, at create: lets the kernel use up to `shared_bytes` of shared memory.
void prepare_decode(DecodeElement element, size_t shared_bytes);
void launch_decode(DecodeElement element, const DecodeParams& params, CUstream_st* stream);

}  // namespace conclave::inline v0::experts
