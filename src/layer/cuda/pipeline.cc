#include "layer/cuda/pipeline.h"

#include "core/checked.h"
#include "dispatch/cuda/clear_rows.h"
#include "dispatch/cuda/combine.h"
#include "dispatch/cuda/group.h"
#include "dispatch/cuda/spread_rows.h"
#include "experts/cuda/quantize_rows_cuda.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/prepare_rows.h"
#include "layer/cuda/routing_stage.h"
#include "layer/cuda/row_format.h"

#include <algorithm>
#include <optional>

namespace conclave::inline v0 {
namespace {

bool is_quantised(const experts::DeviceExpertsProblem& problem) {
  return problem.weight_dtype == DType::kF8E4M3 &&
         problem.quant.activations != ActivationScale::kNone;
}

bool is_aligned(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % kRowAlignmentBytes == 0 &&
         stride_bytes % kRowAlignmentBytes == 0;
}

// Hidden rows in 16 bits, or as they are for float32 weights: the caller's own where they will do.
DeviceRows plain_rows(const CudaCall& call) {
  const CudaPlan& plan = call.plan;
  const ConstTensorView& hidden = call.args.hidden;
  const void* const data = chunk_data(call, hidden);
  const int64_t stride = stride_of_rows(hidden);
  DeviceRows rows{
      .data = data, .num_rows = call.count, .row_stride = stride, .dtype = hidden.dtype};
  if (hidden.dtype == plan.row_dtype && is_aligned(data, stride * byte_size(hidden.dtype))) {
    return rows;
  }
  void* const converted = call.slice<void>(call.slices.hidden_rows);
  convert_rows({.rows = data,
                .dtype = hidden.dtype,
                .row_stride = stride,
                .num_rows = call.count,
                .columns = plan.spec.hidden_size,
                .out = converted,
                .out_dtype = plan.row_dtype,
                .out_stride = plan.row_stride},
               call.stream);
  rows.data = converted;
  rows.row_stride = plan.row_stride;
  rows.dtype = plan.row_dtype;
  return rows;
}

// Where codes and scales go. Sorted: the scales of a group side by side, and with a grouping a copy
// of every row for each of its slots.
struct CodePlace {
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  int64_t num_rows = 0;
  bool sorted = false;
  const GroupedRows* groups = nullptr;
};

DeviceRows quantised_rows(const CudaCall& call, const experts::DeviceExpertsProblem& problem,
                          const CudaMlpWeights& weights, const CodePlace& place) {
  const QuantSpec& quant = problem.quant;
  const ConstTensorView& hidden = call.args.hidden;
  const int64_t columns = problem.hidden_size;
  const bool grouped = quant.activations == ActivationScale::kGroup;
  const SortedCodes sorted = sorted_codes(place.num_rows, columns);
  DeviceRows rows{.data = place.codes,
                  .num_rows = place.num_rows,
                  .row_stride = sorted.row_stride,
                  .dtype = DType::kF8E4M3,
                  .scales = place.scales,
                  .scale_stride = grouped && !place.sorted ? ceil_div(columns, kScaleColumns) : 1,
                  .group_stride = place.sorted ? sorted.group_stride : 1};
  experts::quantize_rows_cuda(
      {.rows = chunk_data(call, hidden),
       .dtype = hidden.dtype,
       .num_rows = call.count,
       .columns = columns,
       .row_stride = stride_of_rows(hidden),
       .activations = quant.activations,
       .power_of_two = quant.power_of_two_scales,
       .static_scale = weights.view.input_scale,
       .codes = place.codes,
       .code_stride = rows.row_stride,
       .scales = place.scales,
       .scale_stride = rows.scale_stride,
       .group_stride = rows.group_stride,
       .slot_row = place.groups == nullptr ? nullptr : place.groups->slot_row,
       .top_k = place.groups == nullptr ? 1 : place.groups->top_k},
      call.stream);
  return rows;
}

// What the experts read: plain rows, or their e4m3 codes and scales, in the order of the tokens.
DeviceRows expert_input(const CudaCall& call, const experts::DeviceExpertsProblem& problem,
                        const CudaMlpWeights& weights, const CudaRung& rung) {
  if (!is_quantised(problem)) return plain_rows(call);
  return quantised_rows(call, problem, weights,
                        {.codes = call.slice<uint8_t>(call.slices.hidden_rows),
                         .scales = call.slice<float>(call.slices.hidden_scales),
                         .num_rows = call.count,
                         .sorted = rung.sorted_input});
}

// The same rows in the order of the grouping, a copy for each row: where the down product, which
// needs them no more, writes its own.
DeviceRows sorted_input(const CudaCall& call, const CudaRouting& routing) {
  const CudaPlan& plan = call.plan;
  const ConstTensorView& hidden = call.args.hidden;
  if (is_quantised(plan.routed)) {
    const int64_t num_rows = routing.groups.max_rows;
    auto* const codes = call.slice<uint8_t>(call.slices.expert_rows);
    auto* const scales = codes + sorted_codes(num_rows, plan.spec.hidden_size).scales;
    return quantised_rows(call, plan.routed, call.weights.routed,
                          {.codes = codes,
                           .scales = reinterpret_cast<float*>(scales),
                           .num_rows = num_rows,
                           .sorted = true,
                           .groups = &routing.groups});
  }
  const DeviceRows rows{.data = call.slice<void>(call.slices.expert_rows),
                        .num_rows = routing.groups.max_rows,
                        .row_stride = plan.row_stride,
                        .dtype = plan.row_dtype};
  dispatch::spread_rows({.rows = chunk_data(call, hidden),
                         .dtype = hidden.dtype,
                         .row_stride = stride_of_rows(hidden),
                         .num_rows = call.count,
                         .live_rows = routing.live_tokens,
                         .columns = plan.spec.hidden_size,
                         .slot_row = routing.groups.slot_row,
                         .top_k = routing.groups.top_k,
                         .out = call.slice<void>(call.slices.expert_rows),
                         .out_dtype = rows.dtype,
                         .out_stride = rows.row_stride},
                        call.stream);
  return rows;
}

bool sorts_input(const CudaCall& call) {
  return call.plan.routed.num_local_experts > 0 &&
         rung_for(call.kernels.routed, call.count).sorted_input;
}

// Whether the shared expert may read what the routed ones do: rows of tokens, which for one expert
// are sorted as they are. A static scale is each kind's own.
bool reads_same_rows(const CudaCall& call) {
  const CudaPlan& plan = call.plan;
  if (sorts_input(call)) return false;
  const bool sorts_codes =
      is_quantised(*plan.shared) && rung_for(call.kernels.shared, call.count).sorted_input;
  if (sorts_codes) return false;
  return plan.routed.weight_dtype == plan.shared->weight_dtype &&
         !(is_quantised(plan.routed) &&
           plan.spec.quant.activations == ActivationScale::kTensorStatic);
}

// A rank without experts groups nothing, and counts the load all the same.
dispatch::DeviceGroupArgs group_args(const CudaCall& call) {
  const CudaPlan& plan = call.plan;
  const int64_t local = plan.routed.num_local_experts;
  return {.local_expert = call.weights.local_expert.as<int32_t>(),
          .num_experts = static_cast<int32_t>(plan.spec.num_experts),
          .num_local_experts = static_cast<int32_t>(std::max<int64_t>(local, 1)),
          .tile_tokens = local == 0
                             ? kLeastGroupTile
                             : rung_for(call.kernels.routed, call.count).kernel->tile_tokens(),
          .expert_load = call.args.expert_load.data(),
          .workspace = call.slice<void>(call.slices.group)};
}

void run_routed(const CudaCall& call, const CudaRouting& routing, const DeviceRows& rows) {
  const CudaPlan& plan = call.plan;
  const bool weighs_input = plan.spec.weight_on == WeightOn::kInput;
  rung_for(call.kernels.routed, call.count)
      .kernel->run({.input = rows,
                    .groups = routing.groups,
                    .input_weights = weighs_input ? routing.topk_weights : nullptr,
                    .workspace = call.slice<void>(call.slices.experts),
                    .output = call.slice<void>(call.slices.expert_rows),
                    .output_stride = plan.row_stride},
                   call.stream);
}

// Whether the experts' only row of a token, weighted, is all of its output: combine has nothing to
// add then.
bool rows_are_output(const CudaCall& call, const CudaRung& rung, const CudaRouting& routing) {
  const CudaPlan& plan = call.plan;
  return plan.spec.top_k == 1 && rung.kernel != nullptr && rung.kernel->finishes_rows() &&
         !plan.shared && routing.identity == nullptr && routing.padding_mask == nullptr &&
         call.weights.output_bias.as<float>() == nullptr && call.args.shared_out.empty() &&
         plan.spec.shared.mode != SharedMode::kAverage && call.args.out.dtype == plan.row_dtype;
}

// The output by the down product itself.
void run_routed_to_output(const CudaCall& call, const CudaRouting& routing,
                          const DeviceRows& rows) {
  const MoeSpec& spec = call.plan.spec;
  const bool weighs_input = spec.weight_on == WeightOn::kInput;
  void* const out = chunk_data(call, call.args.out);
  const int64_t stride = stride_of_rows(call.args.out);
  rung_for(call.kernels.routed, call.count)
      .kernel->run({.input = rows,
                    .groups = routing.groups,
                    .input_weights = weighs_input ? routing.topk_weights : nullptr,
                    .workspace = call.slice<void>(call.slices.experts),
                    .output = out,
                    .output_stride = stride,
                    .finish = {.apply = true,
                               .weights = weighs_input ? nullptr : routing.topk_weights,
                               .scale = static_cast<float>(spec.output_scale)}},
                   call.stream);
  const int64_t element = byte_size(call.args.out.dtype);
  dispatch::clear_rows({.slot_row = routing.groups.slot_row,
                        .num_tokens = call.count,
                        .live_tokens = routing.live_tokens,
                        .row_bytes = spec.hidden_size * element,
                        .out = out,
                        .out_stride_bytes = stride * element},
                       call.stream);
}

// Every row through the one shared expert.
void run_shared(const CudaCall& call, const CudaRouting& routing, const DeviceRows& routed_rows) {
  const CudaPlan& plan = call.plan;
  const CudaRung& rung = rung_for(call.kernels.shared, call.count);
  const DeviceRows rows = reads_same_rows(call)
                              ? routed_rows
                              : expert_input(call, *plan.shared, call.weights.shared, rung);
  const experts::DeviceExpertsKernel& kernel = *rung.kernel;
  const GroupedRows groups =
      dispatch::device_group({.topk_ids = call.weights.zero_ids.as<int32_t>(),
                              .num_tokens = call.count,
                              .live_tokens = routing.live_tokens,
                              .top_k = 1,
                              .num_experts = 1,
                              .num_local_experts = 1,
                              .tile_tokens = kernel.tile_tokens(),
                              .workspace = call.slice<void>(call.slices.group)},
                             call.stream);
  kernel.run({.input = rows,
              .groups = groups,
              .workspace = call.slice<void>(call.slices.experts),
              .output = call.slice<void>(call.slices.shared_rows),
              .output_stride = plan.row_stride},
             call.stream);
}

// sigmoid(x . w), of SharedMode::kSigmoidGate.
void make_shared_factor(const CudaCall& call) {
  const ConstTensorView& hidden = call.args.hidden;
  const int64_t columns = call.plan.spec.hidden_size;
  const DType weight_dtype = call.weights.shared_gate_dtype;
  auto* const factor = call.slice<float>(call.slices.shared_factor);
  gemm::device_gate_product({.rows = chunk_data(call, hidden),
                             .rows_dtype = hidden.dtype,
                             .rows_stride = stride_of_rows(hidden),
                             .num_tokens = call.count,
                             .hidden_size = columns,
                             .weights = call.weights.shared_gate.as(),
                             .weights_dtype = weight_dtype,
                             .weights_stride = padded_row(columns, weight_dtype),
                             .num_logits = 1,
                             .logits = factor},
                            call.stream);
  sigmoid_in_place(factor, call.count, call.stream);
}

void combine(const CudaCall& call, const CudaRouting& routing) {
  const CudaPlan& plan = call.plan;
  const MoeSpec& spec = plan.spec;
  const ForwardArgs& args = call.args;
  const bool average = spec.shared.mode == SharedMode::kAverage;
  dispatch::DeviceCombineArgs combine{
      .expert_rows = call.slice<void>(call.slices.expert_rows),
      .expert_dtype = plan.row_dtype,
      .expert_row_stride = plan.row_stride,
      .topk_ids = routing.topk_ids,
      .topk_weights = spec.weight_on == WeightOn::kInput ? nullptr : routing.topk_weights,
      .local_expert = call.weights.local_expert.as<int32_t>(),
      .num_experts = static_cast<int32_t>(spec.num_experts),
      .num_tokens = call.count,
      .live_tokens = routing.live_tokens,
      .top_k = static_cast<int32_t>(spec.top_k),
      .hidden_size = spec.hidden_size,
      .output_scale = static_cast<float>(spec.output_scale),
      .routed_factor = average ? 0.5F : 1.0F,
      .padding_mask = routing.padding_mask};
  if (plan.part.adds_rest) {
    combine.identity = routing.identity;
    combine.hidden = chunk_data(call, args.hidden);
    combine.hidden_dtype = args.hidden.dtype;
    combine.hidden_stride = stride_of_rows(args.hidden);
    combine.output_bias = call.weights.output_bias.as<float>();
  }
  if (plan.shared) {
    combine.shared_rows = call.slice<void>(call.slices.shared_rows);
    combine.shared_dtype = plan.row_dtype;
    combine.shared_row_stride = plan.row_stride;
    combine.num_shared = 1;
    combine.shared_constant = average ? 0.5F : 1.0F;
    if (spec.shared.mode == SharedMode::kSigmoidGate) {
      make_shared_factor(call);
      combine.shared_factor = call.slice<float>(call.slices.shared_factor);
    }
  }
  combine.out = chunk_data(call, args.out);
  combine.out_dtype = args.out.dtype;
  combine.out_stride = stride_of_rows(args.out);
  if (!args.shared_out.empty()) {
    combine.shared_out = chunk_data(call, args.shared_out);
    combine.shared_out_dtype = args.shared_out.dtype;
    combine.shared_out_stride = stride_of_rows(args.shared_out);
  }
  dispatch::device_combine(combine, call.stream);
}

// The one launch does routed experts and nothing else.
bool fits_one_launch(const CudaCall& call) {
  return call.count <= call.plan.decode_tokens && call.args.expert_load.empty() &&
         call.args.padding_mask.empty();
}

// Ids that no earlier launch has checked are counted by this one.
enum class IdCheck : uint8_t { kDone, kInDecode };

void run_in_one_launch(const CudaCall& call, const CudaRouting& routing, IdCheck check) {
  const MoeSpec& spec = call.plan.spec;
  const ForwardArgs& args = call.args;
  call.kernels.decode->run(
      {.hidden = chunk_data(call, args.hidden),
       .hidden_dtype = args.hidden.dtype,
       .hidden_stride = stride_of_rows(args.hidden),
       .num_tokens = call.count,
       .live_tokens = routing.live_tokens,
       .topk_ids = routing.topk_ids,
       .topk_weights = routing.topk_weights,
       .local_expert = call.weights.local_expert.as<int32_t>(),
       .num_experts = spec.num_experts,
       .skipped_ids = check == IdCheck::kInDecode ? &call.counters->skipped_ids : nullptr,
       .weight_on_input = spec.weight_on == WeightOn::kInput,
       .output_scale = static_cast<float>(spec.output_scale),
       .workspace = call.workspace,
       .out = chunk_data(call, args.out),
       .out_dtype = args.out.dtype,
       .out_stride = stride_of_rows(args.out)},
      call.stream);
}

// One kernel for each row and tile that the ladder names.
std::vector<CudaRung> make_rungs(const std::vector<LadderRung>& ladder,
                                 const experts::DeviceExpertsProblem& problem,
                                 const experts::DeviceExperts& weights, CudaKernels& kernels) {
  std::vector<CudaRung> rungs;
  for (size_t i = 0; i < ladder.size(); ++i) {
    const LadderRung& rung = ladder[i];
    const auto same = std::find_if(ladder.begin(), ladder.begin() + static_cast<std::ptrdiff_t>(i),
                                   [&](const LadderRung& earlier) {
                                     return earlier.row == rung.row && earlier.tile == rung.tile;
                                   });
    const auto index = static_cast<size_t>(same - ladder.begin());
    const experts::DeviceExpertsKernel* kernel = nullptr;
    if (index < i) {
      kernel = rungs[index].kernel;
    } else {
      kernels.owned.push_back(rung.row->make(problem, weights, rung.tile));
      kernel = kernels.owned.back().get();
    }
    rungs.push_back({.last_tokens = rung.last_tokens,
                     .kernel = kernel,
                     .sorted_input = rung.tile.sorted_input});
  }
  return rungs;
}

// Of every rung that serves at most `tokens`.
size_t most_bytes(const std::vector<CudaRung>& rungs, int64_t tokens) {
  size_t bytes = 0;
  for (const CudaRung& rung : rungs) {
    bytes = std::max(bytes, rung.kernel->workspace_bytes(std::min(rung.last_tokens, tokens)));
    if (rung.last_tokens >= tokens) break;
  }
  return bytes;
}

}  // namespace

CudaKernels make_cuda_kernels(const CudaPlan& plan, const CudaWeights& weights) {
  CudaKernels kernels;
  kernels.routed = make_rungs(plan.ladder, plan.routed, weights.routed.view, kernels);
  if (plan.shared) {
    kernels.shared = make_rungs(plan.shared_ladder, *plan.shared, weights.shared.view, kernels);
  }
  if (plan.decode_tokens > 0) {
    kernels.decode = experts::make_decode(plan.routed, weights.routed.view);
  }
  return kernels;
}

KernelBytes kernel_bytes(const CudaKernels& kernels, int64_t tokens) {
  return {.routed = most_bytes(kernels.routed, tokens),
          .shared = most_bytes(kernels.shared, tokens),
          .decode = kernels.decode ? kernels.decode->workspace_bytes() : 0};
}

void run_cuda_chunk(const CudaCall& call) {
  if (call.count == 0) return;
  if (fits_one_launch(call)) {
    if (const std::optional<CudaRouting> given = routing_in_place(call)) {
      return run_in_one_launch(call, *given, IdCheck::kInDecode);
    }
    return run_in_one_launch(call, enqueue_routing(call, nullptr), IdCheck::kDone);
  }
  const bool has_experts = call.plan.routed.num_local_experts > 0;
  const CudaRung rung = has_experts ? rung_for(call.kernels.routed, call.count) : CudaRung{};
  const dispatch::DeviceGroupArgs group = group_args(call);
  const CudaRouting routing = enqueue_routing(call, &group);
  const DeviceRows rows = rung.sorted_input
                              ? sorted_input(call, routing)
                              : expert_input(call, call.plan.routed, call.weights.routed, rung);
  if (rows_are_output(call, rung, routing)) return run_routed_to_output(call, routing, rows);
  if (has_experts) run_routed(call, routing, rows);
  if (call.plan.shared) run_shared(call, routing, rows);
  combine(call, routing);
}

}  // namespace conclave::inline v0
