#include "layer/stages/cuda/mlp.h"

#include "core/checked.h"
#include "core/dcheck.h"
#include "core/row_stride.h"
#include "dispatch/cuda/clear_rows.h"
#include "dispatch/cuda/group.h"
#include "dispatch/cuda/spread_rows.h"
#include "dispatch/cuda/sum_rows.h"
#include "experts/cuda/common/place_codes.h"
#include "experts/cuda/common/quantize_rows.h"
#include "experts/cuda/common/round_rows.h"
#include "gemm/cuda/gate_product.h"
#include "layer/cuda/launch_tables.h"
#include "layer/cuda/own_row_form.h"
#include "layer/cuda/row_format.h"
#include "layer/stages/cuda/adapters.h"
#include "layer/stages/cuda/own_rows.h"
#include "layer/stages/cuda/prepare_rows.h"
#include "quant/weight_format.h"

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

bool is_aligned(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % kRowAlignmentBytes == 0 &&
         stride_bytes % kRowAlignmentBytes == 0;
}

// Rows that are not quantised: the caller's own if the kernel can read them, otherwise a copy.
DeviceRows plain_rows(const CudaChunk& chunk, const CudaMlp& mlp, const SourceRows& source) {
  const CudaMlpPlan& plan = mlp.plan;
  DeviceRows rows{.data = source.data,
                  .num_rows = chunk.count * source.rows_per_token,
                  .row_stride = source.stride,
                  .dtype = source.dtype};
  if (source.is_ready) return rows;
  if (source.dtype == plan.row_dtype &&
      is_aligned(source.data, source.stride * byte_size(source.dtype))) {
    return rows;
  }
  void* const converted = chunk.scratch.at<void>(mlp.buffers.rows);
  convert_rows({.rows = source.data,
                .dtype = source.dtype,
                .row_stride = source.stride,
                .num_rows = chunk.count,
                .columns = plan.problem.hidden_size,
                .out = converted,
                .out_dtype = plan.row_dtype,
                .out_stride = plan.row_stride},
               chunk.stream);
  rows.data = converted;
  rows.row_stride = plan.row_stride;
  rows.dtype = plan.row_dtype;
  return rows;
}

// Rows that became codes before they came here.
experts::CodedRows coded_rows(const CudaChunk& chunk, const CudaMlp& mlp,
                              const SourceRows& source) {
  const experts::ExpertsProblem& problem = mlp.plan.problem;
  const bool grouped = problem.quant.activations == ActivationScale::kGroup;
  return {.codes = static_cast<const uint8_t*>(source.data),
          .dtype = source.dtype,
          .num_rows = chunk.count,
          .columns = problem.hidden_size,
          .code_stride = source.stride,
          .scales = source.scales,
          .scale_stride = source.scale_stride,
          .columns_of_group = grouped ? kScaleColumns : problem.hidden_size};
}

// Destination of codes and scales. If sorted, the scales of a column group lie side by side; with
// `groups` every row is copied once per slot.
struct CodePlace {
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  int64_t num_rows = 0;
  bool sorted = false;
  const GroupedRows* groups = nullptr;
};

DeviceRows quantised_rows(const CudaChunk& chunk, const CudaMlp& mlp, const SourceRows& source,
                          const CodePlace& place) {
  const experts::ExpertsProblem& problem = mlp.plan.problem;
  const QuantSpec& quant = problem.quant;
  const quant::CodeBook& codes = *quant::format_of(problem.weight_dtype).row_codes;
  const int64_t columns = problem.hidden_size;
  const bool grouped = quant.activations == ActivationScale::kGroup;
  const SortedCodes sorted = sorted_codes(place.num_rows, columns);
  const DeviceRows rows{
      .data = place.codes,
      .num_rows = place.num_rows,
      .row_stride = sorted.row_stride,
      .dtype = codes.element,
      .scales = place.scales,
      .scale_stride = grouped && !place.sorted ? ceil_div(columns, kScaleColumns) : 1,
      .group_stride = place.sorted ? sorted.group_stride : 1};
  if (source.are_codes()) {
    CONCLAVE_DCHECK(!rung_for(mlp.rungs, chunk.count).rows_in_lanes);
    experts::place_codes({.rows = coded_rows(chunk, mlp, source),
                          .codes = place.codes,
                          .code_stride = rows.row_stride,
                          .scales = place.scales,
                          .scale_stride = rows.scale_stride,
                          .group_stride = rows.group_stride,
                          .slot_row = place.groups == nullptr ? nullptr : place.groups->slot_row,
                          .top_k = place.groups == nullptr ? 1 : place.groups->top_k},
                         chunk.stream);
    return rows;
  }
  experts::quantize_rows_cuda(
      {.rows = source.data,
       .dtype = source.dtype,
       .num_rows = chunk.count * source.rows_per_token,
       .columns = columns,
       .row_stride = source.stride,
       // The grouping, which ran before this launch, has waited for the caller's rows.
       .rows_are_ready = source.given,
       .activations = quant.activations,
       .power_of_two = quant.power_of_two_scales,
       .static_scale = mlp.weights.view.input_scale,
       .code_dtype = codes.element,
       .codes = place.codes,
       .code_stride = rows.row_stride,
       .in_lanes = rung_for(mlp.rungs, chunk.count).rows_in_lanes,
       .scales = place.scales,
       .scale_stride = rows.scale_stride,
       .group_stride = rows.group_stride,
       .slot_row = place.groups == nullptr ? nullptr : place.groups->slot_row,
       .top_k = place.groups == nullptr || source.rows_per_token > 1 ? 1 : place.groups->top_k},
      chunk.stream);
  return rows;
}

// The values of the rows' codes in bf16, and what belongs to a whole row.
DeviceRows rounded_rows(const CudaChunk& chunk, const CudaMlp& mlp, const SourceRows& source,
                        const experts::RowRounding& rounding) {
  const experts::ExpertsProblem& problem = mlp.plan.problem;
  const bool has_factors = quant::row_factor(problem.quant) == quant::RowFactor::kOfRow;
  const DeviceRows rows{
      .data = chunk.scratch.at<void>(mlp.buffers.rows),
      .num_rows = chunk.count * source.rows_per_token,
      .row_stride = mlp.plan.row_stride,
      .dtype = mlp.plan.row_dtype,
      .scales = has_factors ? chunk.scratch.at<float>(mlp.buffers.scales) : nullptr,
      .scale_stride = 1};
  if (source.are_codes()) {
    experts::code_row_values(
        {.rows = coded_rows(chunk, mlp, source),
         .values = chunk.scratch.at<void>(mlp.buffers.rows),
         .value_stride = rows.row_stride,
         .factors = has_factors ? chunk.scratch.at<float>(mlp.buffers.scales) : nullptr},
        chunk.stream);
    return rows;
  }
  experts::round_rows_cuda(
      {.rows = source.data,
       .dtype = source.dtype,
       .num_rows = rows.num_rows,
       .columns = problem.hidden_size,
       .row_stride = source.stride,
       .rule = rounding,
       .stated_step = mlp.weights.view.input_scale,
       .values = chunk.scratch.at<void>(mlp.buffers.rows),
       .value_stride = rows.row_stride,
       .factors = has_factors ? chunk.scratch.at<float>(mlp.buffers.scales) : nullptr},
      chunk.stream);
  return rows;
}

// The same rows in the order of the grouping, one copy per slot. They lie in the output slice: the
// down product overwrites them with its own rows once they are no longer needed.
DeviceRows sorted_rows(const CudaChunk& chunk, const CudaMlp& mlp, const GroupedRows& groups,
                       const int64_t* live_tokens, const SourceRows& source) {
  const int64_t columns = mlp.plan.problem.hidden_size;
  const auto& rounding = rung_for(mlp.rungs, chunk.count).rounding;
  if (mlp.plan.quantises() && !rounding) {
    auto* const codes = chunk.scratch.at<uint8_t>(mlp.buffers.output);
    auto* const scales = codes + sorted_codes(groups.max_rows, columns).scales;
    return quantised_rows(chunk, mlp, source,
                          {.codes = codes,
                           .scales = reinterpret_cast<float*>(scales),
                           .num_rows = groups.max_rows,
                           .sorted = true,
                           .groups = &groups});
  }
  DeviceRows rows{.data = chunk.scratch.at<void>(mlp.buffers.output),
                  .num_rows = groups.max_rows,
                  .row_stride = mlp.plan.row_stride,
                  .dtype = mlp.plan.row_dtype};
  SourceRows spread = source;
  if (rounding) {
    const DeviceRows values = rounded_rows(chunk, mlp, source, *rounding);
    spread.data = values.data;
    spread.dtype = values.dtype;
    spread.stride = values.row_stride;
    // Kernels look these up in the order of tokens.
    rows.scales = values.scales;
    rows.scale_stride = values.scale_stride;
  }
  const bool has_rows_of_slots = source.rows_per_token > 1;
  dispatch::spread_rows({.rows = spread.data,
                         .dtype = spread.dtype,
                         .row_stride = spread.stride,
                         .num_rows = chunk.count * source.rows_per_token,
                         .live_rows = has_rows_of_slots ? nullptr : live_tokens,
                         .columns = columns,
                         .slot_row = groups.slot_row,
                         .top_k = has_rows_of_slots ? 1 : groups.top_k,
                         .out = chunk.scratch.at<void>(mlp.buffers.output),
                         .out_dtype = rows.dtype,
                         .out_stride = rows.row_stride},
                        chunk.stream);
  return rows;
}

// The down product writes the output itself.
RoutedRows finish_rows(const CudaChunk& chunk, const CudaRung& rung, const CudaRouting& routing,
                       experts::DeviceExpertsCall experts, const TensorView& out) {
  const MoeSpec& spec = chunk.plan.spec;
  const bool weighted = spec.weight_on == WeightOn::kOutput;
  experts.output = out.data;
  experts.output_stride = row_stride(out);
  experts.finish = {.apply = true,
                    .weights = weighted ? routing.topk_weights : nullptr,
                    .scale = static_cast<float>(spec.output_scale)};
  rung.kernel->run(experts, chunk.stream);
  const int64_t element = byte_size(out.dtype);
  dispatch::clear_rows({.slot_row = routing.groups.slot_row,
                        .num_tokens = chunk.count,
                        .live_tokens = routing.live.tokens,
                        .row_bytes = spec.hidden_size * element,
                        .out = experts.output,
                        .out_stride_bytes = experts.output_stride * element},
                       chunk.stream);
  return {.form = RoutedRows::Form::kAreOutput,
          .data = out.data,
          .dtype = out.dtype,
          .stride = experts.output_stride,
          .columns = spec.hidden_size};
}

// The down product weighs the rows and adds them up itself.
RoutedRows add_rows(const CudaChunk& chunk, const CudaRung& rung, const CudaRouting& routing,
                    experts::DeviceExpertsCall experts) {
  const bool weighted = chunk.plan.spec.weight_on == WeightOn::kOutput;
  const int64_t columns = chunk.plan.routed.problem.hidden_size;
  experts.sums = {.rows = chunk.scratch.at<float>(kRoutedSums),
                  .stride = padded_row(columns, DType::kF32),
                  .weights = weighted ? routing.topk_weights : nullptr};
  dispatch::clear_sums(experts.sums.rows, chunk.count * experts.sums.stride, chunk.stream);
  rung.kernel->run(experts, chunk.stream);
  return {.form = RoutedRows::Form::kAreSums,
          .data = experts.sums.rows,
          .dtype = DType::kF32,
          .stride = experts.sums.stride,
          .columns = columns};
}

experts::DeviceExpertsCall routed_call(const CudaChunk& chunk, const CudaRouting& routing,
                                       const DeviceRows& input) {
  const CudaPlan& plan = chunk.plan;
  experts::DeviceExpertsCall experts =
      experts_call(chunk, routed_mlp(chunk), routing.groups, input);
  const bool weighs_products = plan.spec.weight_on == WeightOn::kInput && !plan.weighs_rows;
  if (weighs_products) experts.input_weights = routing.topk_weights;
  // A kernel divides slot s by top_k to find its row; here every slot has its own.
  if (plan.rows_per_token() > 1) experts.groups.top_k = 1;
  return experts;
}

// Float32 rows, one per slot, each multiplied by the slot's weight.
SourceRows weigh_slots(const CudaChunk& chunk, const SourceRows& source, const float* weights) {
  const int64_t columns = chunk.plan.routed.problem.hidden_size;
  const int64_t rows_per_token = chunk.plan.rows_per_token();
  auto* const rows = chunk.scratch.at<float>(kWeighted);
  weigh_rows({.rows = source.data,
              .dtype = source.dtype,
              .row_stride = source.stride,
              .num_rows = chunk.count * rows_per_token,
              .columns = columns,
              .out = rows,
              .out_dtype = DType::kF32,
              .out_stride = columns},
             weights, rows_per_token, chunk.stream);
  return {.data = rows, .dtype = DType::kF32, .stride = columns, .rows_per_token = rows_per_token};
}

// Rows of experts' own are multiplied by the weights, unless null, and go to the buffer.
struct OwnRowArgs {
  const float* weights = nullptr;
  CudaBuffer buffer = kWeighted;
};

// A row for each slot, as its expert reads it. Where they become codes all slots have rows, since
// the launch behind does not know which are used.
SourceRows own_rows(const CudaChunk& chunk, const CudaMlp& mlp, const GroupedRows& groups,
                    const SourceRows& source, const OwnRowArgs& how) {
  const OwnRowTables& tables = mlp.weights.own_rows;
  const OwnRowForm form = own_row_form(mlp.plan);
  void* const rows = chunk.scratch.at<void>(how.buffer);
  make_own_rows({.rows = source.data,
                 .dtype = source.dtype,
                 .row_stride = source.stride,
                 .num_slots = chunk.count * groups.top_k,
                 .slots_per_row = groups.top_k,
                 .slot_row = groups.slot_row,
                 .expert_begin = groups.expert_begin,
                 .num_experts = mlp.plan.problem.num_local_experts,
                 .weights = how.weights,
                 .columns = tables.columns.as<int32_t>(),
                 .factors = tables.factors.as<float>(),
                 .table_stride = tables.stride,
                 .num_columns = mlp.plan.problem.hidden_size,
                 .form = form,
                 .clears_others = mlp.plan.quantises(),
                 .out = rows},
                chunk.stream);
  return {.data = rows,
          .dtype = form.dtype,
          .stride = form.width,
          .is_ready = !mlp.plan.quantises(),
          .rows_per_token = groups.top_k};
}

}  // namespace

CudaMlp routed_mlp(const CudaChunk& chunk) {
  return {chunk.plan.routed, chunk.weights.routed, chunk.kernels.routed, kRoutedBuffers};
}
CudaMlp shared_mlp(const CudaChunk& chunk) {
  return {*chunk.plan.shared, chunk.weights.shared, chunk.kernels.shared, kSharedBuffers,
          chunk.every_row.shared.as<int32_t>()};
}
CudaMlp residual_mlp(const CudaChunk& chunk) {
  return {*chunk.plan.residual, chunk.weights.residual, chunk.kernels.residual, kResidualBuffers,
          chunk.every_row.residual.as<int32_t>()};
}

void make_codes(const CudaChunk& chunk, const CudaMlp& mlp, const SourceRows& source,
                const CodesInBlocks& to) {
  const QuantSpec& quant = mlp.plan.problem.quant;
  experts::quantize_rows_cuda(
      {.rows = source.data,
       .dtype = source.dtype,
       .num_rows = chunk.count,
       .columns = mlp.plan.problem.hidden_size,
       .row_stride = source.stride,
       .activations = quant.activations,
       .power_of_two = quant.power_of_two_scales,
       .code_dtype = quant::format_of(mlp.plan.problem.weight_dtype).row_codes->element,
       .codes = to.codes,
       .code_stride = to.block_bytes,
       .scales = to.scales,
       .scale_stride = to.block_bytes / static_cast<int64_t>(sizeof(float))},
      chunk.stream);
}

SourceRows project_down(const CudaChunk& chunk, const SourceRows& hidden) {
  const MoeSpec& spec = chunk.plan.spec;
  const CudaLayerWeight& down = chunk.weights.own[weights::kLatentDown];
  auto* const rows = chunk.scratch.at<float>(kLatent);
  const SourceRows made{.data = rows, .dtype = DType::kF32, .stride = spec.latent.size};
  if (chunk.count == 0) return made;
  gemm::device_gate_product({.rows = hidden.data,
                             .rows_dtype = hidden.dtype,
                             .rows_stride = hidden.stride,
                             .num_tokens = chunk.count,
                             .hidden_size = spec.hidden_size,
                             .weights = down.memory.as(),
                             .weights_dtype = down.dtype,
                             .weights_stride = padded_row(spec.hidden_size, down.dtype),
                             .num_logits = spec.latent.size,
                             .logits = rows},
                            gate_kernel(chunk.plan.gates.latent_down, chunk.count), chunk.stream);
  return made;
}

SourceRows rows_of_slots(const CudaChunk& chunk, const CudaRouting& routing,
                         const SourceRows& source) {
  const float* const weights = chunk.plan.weighs_rows ? routing.topk_weights : nullptr;
  if (!chunk.plan.routed.has_own_rows()) return weigh_slots(chunk, source, weights);
  return own_rows(chunk, routed_mlp(chunk), routing.groups, source,
                  {.weights = weights, .buffer = kWeighted});
}

DeviceRows kernel_rows(const CudaChunk& chunk, const CudaMlp& mlp, const GroupedRows& groups,
                       const int64_t* live_tokens, const SourceRows& source) {
  // With every row on one expert, the rows are sorted already.
  const bool sorts = rung_for(mlp.rungs, chunk.count).sorted_input &&
                     !(mlp.every_row != nullptr && mlp.plan.problem.num_local_experts == 1);
  return sorts ? sorted_rows(chunk, mlp, groups, live_tokens, source)
               : unsorted_rows(chunk, mlp, source);
}

DeviceRows unsorted_rows(const CudaChunk& chunk, const CudaMlp& mlp, const SourceRows& source) {
  if (!mlp.plan.quantises()) return plain_rows(chunk, mlp, source);
  if (const auto& rounding = rung_for(mlp.rungs, chunk.count).rounding) {
    return rounded_rows(chunk, mlp, source, *rounding);
  }
  return quantised_rows(chunk, mlp, source,
                        {.codes = chunk.scratch.at<uint8_t>(mlp.buffers.rows),
                         .scales = chunk.scratch.at<float>(mlp.buffers.scales),
                         .num_rows = chunk.count * source.rows_per_token,
                         .sorted = rung_for(mlp.rungs, chunk.count).sorted_input});
}

experts::DeviceExpertsCall experts_call(const CudaChunk& chunk, const CudaMlp& mlp,
                                        const GroupedRows& groups, const DeviceRows& rows) {
  return {.input = rows,
          .groups = groups,
          .workspace = chunk.scratch.at<void>(kExperts),
          .output = chunk.scratch.at<void>(mlp.buffers.output),
          .output_stride = mlp.plan.row_stride};
}

RoutedRows stored_rows(const CudaChunk& chunk) {
  const CudaMlpPlan& plan = chunk.plan.routed;
  return {.data = chunk.scratch.at<void>(kRoutedOutput),
          .dtype = plan.row_dtype,
          .stride = plan.row_stride,
          .columns = plan.problem.hidden_size};
}

RoutedRows no_rows(const CudaChunk& chunk) { return stored_rows(chunk); }

RoutedRows run_experts(const CudaChunk& chunk, const CudaRouting& routing, const DeviceRows& input,
                       const TensorView& out) {
  const CudaRung& rung = rung_for(chunk.kernels.routed, chunk.count);
  const bool finishes =
      rung.finishes_rows && out.data != nullptr && out.dtype == chunk.plan.routed.row_dtype;
  if (!finishes && !rung.adds_rows) return store_experts(chunk, routing, input);
  CONCLAVE_DCHECK(rung.skewed == nullptr);
  const experts::DeviceExpertsCall experts = routed_call(chunk, routing, input);
  return finishes ? finish_rows(chunk, rung, routing, experts, out)
                  : add_rows(chunk, rung, routing, experts);
}

RoutedRows store_experts(const CudaChunk& chunk, const CudaRouting& routing,
                         const DeviceRows& input) {
  const CudaRung& rung = rung_for(chunk.kernels.routed, chunk.count);
  experts::DeviceExpertsCall experts = routed_call(chunk, routing, input);
  rung.kernel->run(experts, chunk.stream);
  if (rung.skewed != nullptr) {
    experts.groups = skewed_rows(experts.groups);
    rung.skewed->run(experts, chunk.stream);
  }
  return stored_rows(chunk);
}

SourceRows run_on_every_row(const CudaChunk& chunk, const CudaMlp& mlp, const int64_t* live_tokens,
                            const SourceRows& source, const CudaMarks& marks) {
  const auto experts = static_cast<int32_t>(mlp.plan.problem.num_local_experts);
  const experts::DeviceExpertsKernel& kernel = *rung_for(mlp.rungs, chunk.count).kernel;
  const CudaAdapterRung* const adapted =
      rung_of_every_row(chunk.kernels.shared_adapters, marks, chunk.count);
  const GroupedRows groups = dispatch::device_group(
      {.launches = rung_for(mlp.plan.grouping, chunk.count).launches,
       .topk_ids = mlp.every_row,
       .num_tokens = chunk.count,
       .live_tokens = live_tokens,
       .top_k = experts,
       .num_experts = experts,
       .num_local_experts = experts,
       .tile_tokens = adapted != nullptr ? adapted->kernel->tile_tokens() : kernel.tile_tokens(),
       .workspace = chunk.scratch.at<void>(kGroup)},
      chunk.stream);
  const bool has_own = mlp.plan.has_own_rows();
  const SourceRows own =
      has_own ? own_rows(chunk, mlp, groups, source, {.buffer = kSharedOwn}) : source;
  if (adapted == nullptr) {
    const DeviceRows rows = kernel_rows(chunk, mlp, groups, live_tokens, own);
    experts::DeviceExpertsCall call = experts_call(chunk, mlp, groups, rows);
    if (has_own) call.groups.top_k = 1;
    kernel.run(call, chunk.stream);
  }
  if (marks.any()) {
    run_adapted_shared(chunk, groups, marks, live_tokens, {.tokens = source, .rows = own});
  }
  return {.data = chunk.scratch.at<void>(mlp.buffers.output),
          .dtype = mlp.plan.row_dtype,
          .stride = mlp.plan.row_stride};
}

}  // namespace conclave::inline v0
