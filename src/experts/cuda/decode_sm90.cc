#include "experts/cuda/decode_sm90.h"

#include "core/dcheck.h"
#include "cuda/tensor_map.h"

#include "conclave/error.h"

#include <array>
#include <memory>
#include <string>

namespace conclave::inline v0::experts {
namespace {

constexpr size_t kBarrierBytes = 256;

DecodeElement element_of(const DeviceExpertsProblem& problem) {
  if (problem.weight_dtype == DType::kF16) return DecodeElement::kF16;
  if (problem.weight_dtype == DType::kBF16) return DecodeElement::kBF16;
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

CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

// [experts, rows, width], boxes of `box_rows` rows.
CUtensorMap map_rows(const void* data, DType dtype, int64_t experts, int64_t rows, int64_t width,
                     int64_t stride_bytes, int32_t box_rows, int32_t box_columns) {
  const std::array<cuda::MapDimension, 3> dimensions = {{
      {.size = static_cast<uint64_t>(width), .box = static_cast<uint32_t>(box_columns)},
      {.size = static_cast<uint64_t>(rows),
       .stride_bytes = static_cast<uint64_t>(stride_bytes),
       .box = static_cast<uint32_t>(box_rows)},
      {.size = static_cast<uint64_t>(experts),
       .stride_bytes = static_cast<uint64_t>(rows * stride_bytes)},
  }};
  return cuda::make_tensor_map({.data = data, .type = map_type(dtype), .dimensions = dimensions});
}

// Gate and up interleaved by the map: 8 gate rows, then the 8 up rows of the same features.
CUtensorMap map_gate_up(const DeviceExperts& weights, const DeviceExpertsProblem& problem,
                        const DecodePlan& plan) {
  const int64_t row_bytes = weights.gate_up_stride * plan.element_bytes;
  const int64_t features = problem.intermediate_size;
  const auto columns = static_cast<uint32_t>(kDecodeBoxBytes / plan.element_bytes);
  const std::array<cuda::MapDimension, 5> dimensions = {{
      {.size = static_cast<uint64_t>(problem.hidden_size), .box = columns},
      {.size = 8, .stride_bytes = static_cast<uint64_t>(row_bytes), .box = 8},
      {.size = 2, .stride_bytes = static_cast<uint64_t>(features * row_bytes), .box = 2},
      {.size = static_cast<uint64_t>(plan.feature_tiles),
       .stride_bytes = static_cast<uint64_t>(8 * row_bytes)},
      {.size = static_cast<uint64_t>(problem.num_local_experts),
       .stride_bytes = static_cast<uint64_t>(2 * features * row_bytes)},
  }};
  return cuda::make_tensor_map(
      {.data = weights.gate_up, .type = map_type(problem.weight_dtype), .dimensions = dimensions});
}

class DecodeSm90 final : public DeviceDecodeKernel {
 public:
  DecodeSm90(const DeviceExpertsProblem& problem, const DeviceExperts& weights)
      : element_(element_of(problem)), shared_limit_(problem.device.shared_bytes_per_block) {
    const DecodePlan plan = decode_plan(problem);
    params_.plan = plan;
    params_.weights = weights;
    params_.activation = activation::device_activation(problem.activation);
    params_.row_scale = row_scale_of(problem.quant);
    params_.power_of_two_scales = problem.quant.power_of_two_scales;
    const int32_t columns = kDecodeBoxBytes / plan.element_bytes;
    params_.up_map =
        problem.activation.gated
            ? map_gate_up(weights, problem, plan)
            : map_rows(weights.gate_up, problem.weight_dtype, problem.num_local_experts,
                       problem.intermediate_size, problem.hidden_size,
                       weights.gate_up_stride * plan.element_bytes, 16, columns);
    params_.down_map = map_rows(weights.down, problem.weight_dtype, problem.num_local_experts,
                                problem.hidden_size, problem.intermediate_size,
                                weights.down_stride * plan.element_bytes, plan.pass_rows, columns);
    prepare_decode(element_, static_cast<size_t>(shared_limit_));
  }

  int64_t max_tokens() const override { return params_.plan.max_tokens; }
  size_t workspace_bytes() const override {
    const DecodePlan& plan = params_.plan;
    return kBarrierBytes + static_cast<size_t>(int64_t{plan.max_tokens} * plan.top_k *
                                               plan.intermediate_stride * plan.intermediate_bytes);
  }
  std::string describe() const override {
    const DecodePlan& plan = params_.plan;
    return "cuda.decode_sm90 one launch of " + std::to_string(plan.blocks) + " blocks, " +
           std::to_string(plan.block_rows()) + " columns each in " + std::to_string(plan.k_slices) +
           " slices, up to " + std::to_string(plan.max_tokens) + " tokens";
  }
  void run(const DeviceDecodeCall& call, CUstream_st* stream) const override {
    CONCLAVE_DCHECK(call.num_tokens <= params_.plan.max_tokens);
    if (call.num_tokens == 0) return;
    DecodeParams params = params_;
    params.call = call;
    params.shared = decode_shared(params.plan, call.num_tokens, shared_limit_);
    launch_decode(element_, params, stream);
  }

 private:
  DecodeElement element_;
  int64_t shared_limit_;
  DecodeParams params_;
};

}  // namespace

std::unique_ptr<DeviceDecodeKernel> make_decode(const DeviceExpertsProblem& problem,
                                                const DeviceExperts& weights) {
  if (const Support support = decode_supports(problem); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "the decode kernel cannot run this layer", .found = support.reason()});
  }
  return std::make_unique<DecodeSm90>(problem, weights);
}

}  // namespace conclave::inline v0::experts
