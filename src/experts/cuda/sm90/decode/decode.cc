#include "experts/cuda/sm90/decode/decode.h"

#include "core/checked.h"
#include "core/dcheck.h"
#include "core/weight_types.h"
#include "cuda/tensor_map.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/code_values.h"
#include "experts/cuda/sm90/decode/decode_row.h"
#include "experts/cuda/sm90/tensor_maps.h"
#include "quant/activation_rows.h"
#include "quant/weight_format.h"

#include "conclave/error.h"

#include <array>
#include <memory>
#include <string>

namespace conclave::inline v0::experts {
namespace {

DecodeElement element_of_codes(const ExpertsProblem& problem) {
  const FactorForm form = factor_form(problem);
  if (form == FactorForm::kExact) {
    return has_scales_of_powers(problem) ? DecodeElement::kCodes4Powers
                                         : DecodeElement::kCodes4Floats;
  }
  if (form == FactorForm::kSmallSteps) return DecodeElement::kCodes2;
  if (multiplies_steps(problem)) {
    return form == FactorForm::kSteps ? DecodeElement::kCodes4TimesOffsetSteps
                                      : DecodeElement::kCodes4TimesSteps;
  }
  if (form == FactorForm::kSteps) {
    return bit_size(problem.weight_dtype) == 8 ? DecodeElement::kCodes8OffsetSteps
                                               : DecodeElement::kCodes4InOrderSteps;
  }
  if (form == FactorForm::kScaleSteps) return DecodeElement::kCodes8Steps;
  const bool offsets = form == FactorForm::kOffsets;
  if (bit_size(problem.weight_dtype) == 8) {
    if (offsets) return DecodeElement::kCodes8Offsets;
    return takes_whole_bytes(problem) ? DecodeElement::kWholes8 : DecodeElement::kCodes8;
  }
  const bool two_terms = takes_two_terms(problem.weight_dtype);
  switch (code_order(problem)) {
    case CodeOrder::kLanesOfNumbers:
      return offsets ? DecodeElement::kCodes4InOrderOffsets : DecodeElement::kCodes4InOrder;
    case CodeOrder::kLanesOfPairs:
      return two_terms ? DecodeElement::kCodes4PairsInTerms : DecodeElement::kCodes4InPairs;
    default:
      break;
  }
  if (offsets) return DecodeElement::kCodes4Offsets;
  return two_terms ? DecodeElement::kCodes4Terms : DecodeElement::kCodes4;
}

DecodeElement element_of(const ExpertsProblem& problem, const DecodePlan& plan) {
  if (problem.weight_dtype == DType::kF16) return DecodeElement::kF16;
  if (problem.weight_dtype == DType::kBF16) return DecodeElement::kBF16;
  if (!plan.makes_codes) return element_of_codes(problem);
  if (quant::activation_rule(problem.weight_dtype, problem.quant).is_exact()) {
    return DecodeElement::kInt8Row;
  }
  return problem.quant.weights == WeightScale::kBlock ? DecodeElement::kE4M3Block
                                                      : DecodeElement::kE4M3Row;
}

RowScale row_scale_of(const QuantSpec& quant) {
  switch (quant.activations) {
    case ActivationScale::kToken:
      return RowScale::kToken;
    case ActivationScale::kTensorStatic:
      return RowScale::kStatic;
    default:
      return RowScale::kGroup;
  }
}

struct MatrixMap {
  const void* data;
  DType dtype;
  int64_t matrices;  // two per expert if gate and up are interleaved
  int64_t rows;
  int64_t width;
  int64_t stride_bytes;
  int32_t copy_boxes;  // per copy, side by side
};

// Sets the first and fourth dimension: columns and 1, or the columns of a box and boxes.
void fill_width(const MatrixMap& map, cuda::MapDimension& columns, cuda::MapDimension& boxes) {
  // Codes are bytes of them.
  const uint64_t element = is_plain(map.dtype) ? static_cast<uint64_t>(byte_size(map.dtype)) : 1;
  const uint64_t line = kDecodeBoxBytes / element;
  const uint64_t width = static_cast<uint64_t>(packed_bytes(map.dtype, map.width)) / element;
  columns = {.size = map.copy_boxes > 1 ? line : width, .box = static_cast<uint32_t>(line)};
  boxes = {.size = map.copy_boxes > 1 ? width / line : 1,
           .stride_bytes = kDecodeBoxBytes,
           .box = static_cast<uint32_t>(map.copy_boxes)};
}

// Maps boxes of `box_rows` rows. Dimensions: column, row, matrix, box, unused.
CUtensorMap map_boxes(const MatrixMap& map, int32_t box_rows) {
  std::array<cuda::MapDimension, 5> dimensions;
  fill_width(map, dimensions[0], dimensions[3]);
  dimensions[1] = {.size = static_cast<uint64_t>(map.rows),
                   .stride_bytes = static_cast<uint64_t>(map.stride_bytes),
                   .box = static_cast<uint32_t>(box_rows)};
  dimensions[2] = {.size = static_cast<uint64_t>(map.matrices),
                   .stride_bytes = static_cast<uint64_t>(map.rows * map.stride_bytes)};
  dimensions[4] = {.size = 1, .stride_bytes = kDecodeBoxBytes};
  return cuda::make_tensor_map(
      {.data = map.data, .type = map_type(map.dtype), .dimensions = dimensions});
}

// Interleaves gate and up, 8 rows of each. Dimensions: column, row, gate or up, box, 8-row group.
CUtensorMap map_gated_boxes(const MatrixMap& map) {
  std::array<cuda::MapDimension, 5> dimensions;
  fill_width(map, dimensions[0], dimensions[3]);
  dimensions[1] = {.size = 8, .stride_bytes = static_cast<uint64_t>(map.stride_bytes), .box = 8};
  dimensions[2] = {.size = static_cast<uint64_t>(map.matrices),
                   .stride_bytes = static_cast<uint64_t>(map.rows * map.stride_bytes),
                   .box = 2};
  dimensions[4] = {.size = static_cast<uint64_t>((map.rows + 7) / 8),
                   .stride_bytes = static_cast<uint64_t>(8 * map.stride_bytes)};
  return cuda::make_tensor_map(
      {.data = map.data, .type = map_type(map.dtype), .dimensions = dimensions});
}

class DecodeSm90 final : public OneLaunchKernel {
 public:
  DecodeSm90(const ExpertsProblem& problem, const DeviceExperts& weights)
      : shared_limit_(problem.gpu().shared_bytes_per_block) {
    const DecodePlan plan = decode_plan(problem);
    element_ = element_of(problem, plan);
    params_.plan = plan;
    params_.weights = weights;
    params_.activation = activation::device_activation(problem.activation);
    params_.row_scale = row_scale_of(problem.quant);
    params_.power_of_two_scales = problem.quant.power_of_two_scales;
    const bool gated = problem.activation.gated;
    const MatrixMap gate_up = {
        .data = weights.gate_up.data,
        .dtype = problem.weight_dtype,
        .matrices = problem.num_local_experts * (gated ? 2 : 1),
        .rows = problem.intermediate_size,
        .width = stored_columns(problem, problem.hidden_size),
        .stride_bytes = packed_bytes(problem.weight_dtype, weights.gate_up.stride),
        .copy_boxes = plan.up_copy_boxes};
    params_.up_map = gated ? map_gated_boxes(gate_up) : map_boxes(gate_up, 16);
    params_.down_map =
        map_boxes({.data = weights.down.data,
                   .dtype = problem.weight_dtype,
                   .matrices = problem.num_local_experts,
                   .rows = problem.hidden_size,
                   .width = stored_columns(problem, problem.intermediate_size),
                   .stride_bytes = packed_bytes(problem.weight_dtype, weights.down.stride),
                   .copy_boxes = plan.down_copy_boxes},
                  plan.pass_rows);
    if (plan.factor_bytes != 0) map_codes(problem, weights);
    prepare_decode(element_, static_cast<size_t>(shared_limit_));
  }

  int64_t max_tokens() const override { return params_.plan.max_tokens; }
  std::string describe() const override {
    const DecodePlan& plan = params_.plan;
    return "cuda.decode_sm90 one launch of " + std::to_string(plan.blocks) + " blocks, " +
           std::to_string(plan.passes * plan.pass_rows) + " columns each, up to " +
           std::to_string(plan.max_tokens) + " tokens";
  }
  void run(const OneLaunchCall& call, CUstream_st* stream) const override {
    CONCLAVE_DCHECK(call.num_tokens <= params_.plan.max_tokens);
    if (call.num_tokens == 0) return;
    DecodeParams params = params_;
    params.call = call;
    params.shared = decode_shared(params.plan, call.num_tokens, shared_limit_);
    launch_decode(element_, params, stream);
  }

 private:
  void map_codes(const ExpertsProblem& problem, const DeviceExperts& weights) {
    const DecodePlan& plan = params_.plan;
    const FactorPlanes& up = weights.gate_up.factors;
    const FactorPlanes& down = weights.down.factors;
    if (up.bytes != nullptr) {
      params_.up_scales = map_exact_scales(problem, up, 16, plan.up_factors.stage_groups);
      params_.down_scales =
          map_exact_scales(problem, down, plan.down_scale_rows, plan.down_factors.stage_groups);
      return;
    }
    if (up.scales == nullptr && up.steps == nullptr) {
      throw Error(ErrorCode::kState, {.what = "cuda.decode_sm90 needs FactorPlanes of codes"});
    }
    const auto map_up = [&](const void* data, DType dtype) {
      return map_factors(problem, up, {data, dtype}, 16, plan.up_factors.stage_groups);
    };
    const auto map_down = [&](const void* data, DType dtype) {
      return map_factors(problem, down, {data, dtype}, plan.pass_rows,
                         plan.down_factors.stage_groups);
    };
    params_.values = bf16_values(problem.weight_dtype);
    params_.least = quant::format_of(problem.weight_dtype).codes->whole.least;
    if (up.steps != nullptr) {
      const FactorForm form = factor_form(problem);
      const auto words = [&](const DecodeFactors& factors) {
        return static_cast<int32_t>(step_words(form, factors.stage_groups));
      };
      params_.up_scales = map_step_words(problem, up, 16, words(plan.up_factors));
      params_.down_scales = map_step_words(problem, down, plan.pass_rows, words(plan.down_factors));
      const int32_t units = units_of_box(problem);
      params_.up_seconds = map_step_units(problem, up, 16, kDecodeUpStageBoxes * units);
      params_.down_seconds =
          map_step_units(problem, down, plan.pass_rows, plan.down_stage_boxes * units);
      return;
    }
    params_.up_scales = map_up(up.scales, DType::kF32);
    params_.down_scales = map_down(down.scales, DType::kF32);
    if (up.zeros == nullptr && up.offsets == nullptr) return;
    const DType dtype = up.zeros == nullptr ? DType::kF32 : DType::kBF16;
    params_.second_bytes = static_cast<int32_t>(byte_size(dtype));
    params_.up_seconds = map_up(up.zeros == nullptr ? up.offsets : up.zeros, dtype);
    params_.down_seconds = map_down(down.zeros == nullptr ? down.offsets : down.zeros, dtype);
  }

  DecodeElement element_ = DecodeElement::kBF16;
  int64_t shared_limit_;
  DecodeParams params_;
};

}  // namespace

std::unique_ptr<OneLaunchKernel> make_decode(const ExpertsProblem& problem,
                                             const DeviceExperts& weights) {
  if (const Support support = decode_supports(problem); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "the decode kernel cannot run this layer", .found = support.reason()});
  }
  return std::make_unique<DecodeSm90>(problem, weights);
}

}  // namespace conclave::inline v0::experts
