#include "layer/stages/cuda/adapters.h"

#include "core/row_stride.h"
#include "dispatch/cuda/group.h"
#include "experts/cuda/adapters/adapter_kernel.h"
#include "layer/cuda/launch_tables.h"
#include "layer/stages/cuda/adapter_marks.h"

namespace conclave::inline v0 {
namespace {

using enum CudaBuffer;

// One kind of experts with the adapters of a call.
struct AdaptedMlp {
  CudaMlp mlp;  // with the buffers and input rows of the kernels for adapters
  const CudaAdapterRung& rung;
  const CudaMarks& marks;
  const experts::DeviceExpertFactors* const* factors = nullptr;
};

AdaptedMlp adapted_routed(const CudaChunk& chunk, const CudaMarks& marks) {
  const CudaAdapterKernels& kernels = chunk.kernels.routed_adapters;
  return {.mlp = {chunk.plan.routed, chunk.weights.routed, kernels.rows, kAdaptedRoutedBuffers},
          .rung = rung_for(kernels.rungs, chunk.count),
          .marks = marks,
          .factors = marks.table->routed};
}

AdaptedMlp adapted_shared(const CudaChunk& chunk, const CudaMarks& marks) {
  const CudaAdapterKernels& kernels = chunk.kernels.shared_adapters;
  return {.mlp = {*chunk.plan.shared, chunk.weights.shared, kernels.rows, kAdaptedSharedBuffers,
                  chunk.every_row.shared.as<int32_t>()},
          .rung = rung_for(kernels.rungs, chunk.count),
          .marks = marks,
          .factors = marks.table->shared};
}

// The choices of tokens that have an adapter, grouped for the kernel of these.
GroupedRows group_marked(const CudaChunk& chunk, const AdaptedMlp& adapted,
                         dispatch::DeviceGroupArgs group) {
  auto* const ids = chunk.scratch.at<int32_t>(kAdapterIds);
  split_choices({.ids = group.topk_ids,
                 .marks = adapted.marks.by_token,
                 .num_tokens = chunk.count,
                 .slots = group.top_k,
                 .marked = ids},
                chunk.stream);
  group.topk_ids = ids;
  group.num_tokens = chunk.count;
  group.num_local_experts = static_cast<int32_t>(adapted.mlp.plan.problem.num_local_experts);
  group.tile_tokens = adapted.rung.kernel->tile_tokens();
  group.workspace = chunk.scratch.at<void>(kAdapterGroup);
  return dispatch::device_group(group, chunk.stream);
}

// Rows of slots are weighed as products, or before they are quantised and so as terms, too.
struct SlotWeights {
  const float* products = nullptr;
  const float* terms = nullptr;
};

void run_kernel(const CudaChunk& chunk, const AdaptedMlp& adapted, const GroupedRows& groups,
                const AdaptedSource& source, const SlotWeights& weights) {
  const experts::ExpertsProblem& problem = adapted.mlp.plan.problem;
  const CudaMarks& marks = adapted.marks;
  const DeviceRows input = unsorted_rows(chunk, adapted.mlp, source.rows);
  const int64_t terms = experts::most_adapter_terms(chunk.plan.options.max_adapter_rank);
  experts::AdaptedCall call{.experts = experts_call(chunk, adapted.mlp, groups, input),
                            .adapters = {.adapters = adapted.factors,
                                         .marks = marks.by_token,
                                         .mark = marks.mark,
                                         .most_terms = marks.table->most_terms,
                                         .slots_per_token = static_cast<int32_t>(problem.top_k)},
                            .source = {.rows = source.tokens.data,
                                       .dtype = source.tokens.dtype,
                                       .stride = source.tokens.stride,
                                       .columns = problem.hidden_size,
                                       .weights = weights.terms},
                            .up = {.rows = chunk.scratch.at<experts::RowFactors>(kAdapterUp),
                                   .terms = chunk.scratch.at<float>(kAdapterUpTerms),
                                   .stride = terms},
                            .down = {.rows = chunk.scratch.at<experts::RowFactors>(kAdapterDown),
                                     .terms = chunk.scratch.at<float>(kAdapterDownTerms),
                                     .stride = terms / 2}};
  call.experts.input_weights = weights.products;
  // Kernels divide a slot by top_k to find its row; here every slot may have its own.
  if (source.rows.rows_per_token > 1) call.experts.groups.top_k = 1;
  adapted.rung.kernel->run(call, chunk.stream);
}

}  // namespace

const CudaAdapterRung* rung_of_every_row(const CudaAdapterKernels& kernels, const CudaMarks& marks,
                                         int64_t tokens) {
  if (!marks.any() || kernels.rungs.empty()) return nullptr;
  const CudaAdapterRung& rung = rung_for(kernels.rungs, tokens);
  return rung.in_one_pass || marks.by_token == nullptr ? &rung : nullptr;
}

CudaMarks enqueue_marks(const CudaChunk& chunk, const ForwardArgs& args, const LiveRows& live) {
  const CudaAdapterTable* const table = chunk.adapters.table;
  if (args.adapter_ids.empty()) return {.table = table, .mark = chunk.adapters.mark};
  auto* const marks = chunk.scratch.at<int32_t>(kAdapterMarks);
  mark_tokens({.ids = args.adapter_ids.data,
               .ids_dtype = args.adapter_ids.dtype,
               .num_tokens = chunk.count,
               .live_tokens = live.tokens,
               .padding_mask = live.padding_mask,
               .known = table == nullptr ? nullptr : table->ids,
               .num_known = table == nullptr ? 0 : table->count,
               .unknown = &chunk.counters->skipped_ids,
               .marks = marks},
              chunk.stream);
  return {.table = table, .by_token = marks};
}

SplitRouting split_by_marks(const CudaChunk& chunk, const CudaRouting& routing,
                            const CudaMarks& marks) {
  const CudaPlan& plan = chunk.plan;
  auto* const marked = chunk.scratch.at<int32_t>(kAdapterIds);
  auto* const others = chunk.scratch.at<int32_t>(kOtherIds);
  split_choices({.ids = routing.topk_ids,
                 .marks = marks.by_token,
                 .num_tokens = chunk.count,
                 .slots = plan.num_slots(),
                 .marked = marked,
                 .others = others},
                chunk.stream);
  SplitRouting split{.others = routing, .marked = routing};
  split.others.topk_ids = others;
  split.marked.topk_ids = marked;
  split.marked.groups = dispatch::device_group(
      {.launches = routed_launches(plan, chunk.count),
       .topk_ids = marked,
       .num_tokens = chunk.count,
       .live_tokens = routing.live.tokens,
       .top_k = plan.num_slots(),
       .local_expert = chunk.weights.local_expert.as<int32_t>(),
       .num_experts = plan.num_ids(),
       .num_local_experts = static_cast<int32_t>(plan.routed.problem.num_local_experts),
       .tile_tokens =
           rung_for(chunk.kernels.routed_adapters.rungs, chunk.count).kernel->tile_tokens(),
       .workspace = chunk.scratch.at<void>(kAdapterGroup)},
      chunk.stream);
  return split;
}

RoutedRows run_adapted_experts(const CudaChunk& chunk, const CudaRouting& routing,
                               const CudaMarks& marks, const AdaptedSource& source) {
  const CudaPlan& plan = chunk.plan;
  const AdaptedMlp adapted = adapted_routed(chunk, marks);
  const bool on_input = plan.spec.weight_on == WeightOn::kInput;
  const SlotWeights weights{
      .products = on_input && !plan.weighs_rows ? routing.topk_weights : nullptr,
      .terms = plan.weighs_rows ? routing.topk_weights : nullptr};
  const bool takes_every_row =
      rung_of_every_row(chunk.kernels.routed_adapters, marks, chunk.count) != nullptr;
  const CudaChunk own = chunk.at(CudaStage::kExperts);
  if (takes_every_row || source.only_marked) {
    run_kernel(own, adapted, routing.groups, source, weights);
    return stored_rows(own);
  }
  const DeviceRows input = kernel_rows(chunk.at(CudaStage::kInput), routed_mlp(chunk),
                                       routing.groups, routing.live.tokens, source.rows);
  store_experts(own, routing, input);
  const GroupedRows groups = group_marked(own, adapted,
                                          {.launches = routed_launches(plan, chunk.count),
                                           .topk_ids = routing.topk_ids,
                                           .live_tokens = routing.live.tokens,
                                           .top_k = plan.num_slots(),
                                           .local_expert = chunk.weights.local_expert.as<int32_t>(),
                                           .num_experts = plan.num_ids()});
  run_kernel(own, adapted, groups, source, weights);
  return stored_rows(own);
}

void run_adapted_shared(const CudaChunk& chunk, const GroupedRows& groups, const CudaMarks& marks,
                        const int64_t* live_tokens, const AdaptedSource& source) {
  const AdaptedMlp adapted = adapted_shared(chunk, marks);
  if (rung_of_every_row(chunk.kernels.shared_adapters, marks, chunk.count) != nullptr) {
    return run_kernel(chunk, adapted, groups, source, {});
  }
  const auto experts = static_cast<int32_t>(adapted.mlp.plan.problem.num_local_experts);
  const GroupedRows marked =
      group_marked(chunk, adapted,
                   {.launches = rung_for(adapted.mlp.plan.grouping, chunk.count).launches,
                    .topk_ids = adapted.mlp.every_row,
                    .live_tokens = live_tokens,
                    .top_k = experts,
                    .num_experts = experts});
  run_kernel(chunk, adapted, marked, source, {});
}

void select_adapted_rows(const CudaChunk& chunk, const CudaMarks& marks, const LiveRows& live,
                         const TensorView& adapted, const TensorView& out) {
  const int64_t element = byte_size(out.dtype);
  copy_marked_rows({.marks = marks.by_token,
                    .num_tokens = chunk.count,
                    .live_tokens = live.tokens,
                    .row_bytes = static_cast<size_t>(out.shape[1] * element),
                    .from = adapted.data,
                    .from_stride_bytes = row_stride(adapted) * element,
                    .to = out.data,
                    .to_stride_bytes = row_stride(out) * element},
                   chunk.stream);
}

}  // namespace conclave::inline v0
