#include "layer/book_workspace.h"

#include "core/checked.h"

#include "conclave/error.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

// Rows that a dense product reads are padded to this many elements: whole vectors of float32.
constexpr int64_t kFloatsPerVector = 16;

int64_t elements(int64_t rows, int64_t columns, const char* what) {
  if (const auto product = checked_mul(rows, columns)) return *product;
  throw Error(ErrorCode::kSizeOverflow,
              {.what = std::string("the workspace exceeds 63 bits"), .tensor = what});
}

bool reads_float_rows(const MoeSpec& spec) {
  return spec.has_gate || spec.shared.mode == SharedMode::kSigmoidGate ||
         spec.shared.mode == SharedMode::kSoftmaxMix || spec.latent.size != 0;
}

void book_routing(const LayerPlan& plan, WorkspaceLayout& layout, LayerSlices& slices) {
  const MoeSpec& spec = plan.spec;
  const int64_t tokens = plan.options.max_tokens;
  slices.logits = layout.book<float>(elements(tokens, num_logits(spec), "logits"));
  slices.topk_ids = layout.book<int32_t>(elements(tokens, spec.top_k, "topk_ids"));
  slices.topk_weights = layout.book<float>(tokens * spec.top_k);
  if (plan.part.has_replicas()) slices.physical_ids = layout.book<int32_t>(tokens * spec.top_k);
  slices.given_ids = layout.book<int32_t>(tokens * spec.top_k);
  if (plan.router_traits.token_ids != routing::TokenIds::kUnused) {
    slices.token_ids = layout.book<int32_t>(tokens);
  }
  slices.router_scratch = layout.book_bytes(static_cast<int64_t>(plan.router_scratch_bytes), 1);
  if (plan.stages.weighs_shared_rows) {
    slices.shared_weights = layout.book<float>(elements(tokens, spec.shared.count, "shared"));
  }
  if (spec.num_zero_experts > 0) slices.identity_weights = layout.book<float>(tokens);
}

void book_inputs(const LayerPlan& plan, WorkspaceLayout& layout, LayerSlices& slices) {
  const MoeSpec& spec = plan.spec;
  const int64_t tokens = plan.options.max_tokens;
  const auto book_rows = [&](int64_t row_bytes) {
    return layout.book_bytes(tokens, static_cast<size_t>(row_bytes));
  };
  if (plan.stages.reads_hidden_rows) slices.rows = book_rows(plan.stages.hidden_rows.row_bytes);
  // Dense products read float32 rows, whatever type the kernel reads, and router_input may differ
  // from hidden.
  if (reads_float_rows(spec)) slices.gate_rows = book_rows(plan.gate_row_bytes);
  if (plan.stages.has_expert_input) {
    const int64_t rows = elements(tokens, plan.stages.rows_per_token, "expert_input");
    slices.expert_input =
        layout.book_bytes(rows, static_cast<size_t>(plan.experts->requirements().row_bytes));
  }
  if (spec.latent.size != 0) {
    slices.latent = layout.book<float>(elements(tokens, spec.latent.size, "latent"));
  }
  if (spec.weight_on == WeightOn::kInput) {
    slices.unit_weights = layout.book<float>(tokens * spec.top_k);
  }
  if (plan.residual) slices.residual_input = book_rows(plan.residual->requirements().row_bytes);
}

void book_experts(const LayerPlan& plan, WorkspaceLayout& layout, LayerSlices& slices) {
  const MoeSpec& spec = plan.spec;
  const int64_t tokens = plan.options.max_tokens;
  const int64_t slots = plan.dispatcher->max_slots();
  const int64_t shared_slots = plan.shared ? elements(tokens, spec.shared.count, "shared") : 0;
  size_t scratch = plan.experts->workspace_bytes(slots);
  if (plan.shared) scratch = std::max(scratch, plan.shared->workspace_bytes(shared_slots));
  if (plan.residual) scratch = std::max(scratch, plan.residual->workspace_bytes(tokens));
  slices.dispatch = layout.book_bytes(static_cast<int64_t>(plan.dispatcher->workspace_bytes()), 1);
  slices.experts = layout.book_bytes(static_cast<int64_t>(scratch), 1);
  slices.expert_rows = layout.book<float>(elements(slots, expert_width(spec), "expert_rows"));
  if (plan.shared || plan.residual) {
    const int64_t experts = plan.shared ? spec.shared.count : 1;
    slices.all_rows = layout.book<int64_t>(std::max(shared_slots, tokens));
    slices.all_rows_begin = layout.book<int64_t>(experts);
    slices.all_rows_count = layout.book<int64_t>(experts);
  }
  if (plan.shared) {
    slices.shared_rows = layout.book<float>(elements(shared_slots, spec.hidden_size, "shared"));
  }
  if (spec.shared.mode != SharedMode::kNone) slices.shared_gate = layout.book<float>(tokens);
  if (plan.residual) {
    slices.residual_rows = layout.book<float>(elements(tokens, spec.hidden_size, "residual"));
  }
}

void book_sums(const LayerPlan& plan, WorkspaceLayout& layout, LayerSlices& slices) {
  const MoeSpec& spec = plan.spec;
  const int64_t tokens = plan.options.max_tokens;
  if (plan.stages.mixes) {
    slices.mix = layout.book<float>(tokens);
    slices.mix_logits = layout.book<float>(2 * tokens);
  }
  if (plan.part.reduces()) {
    const int64_t rows = elements(tokens, spec.hidden_size, "reduced");
    slices.reduced_sum = layout.book<float>(elements(tokens, plan.stages.routed_sum_stride, "sum"));
    if (plan.shared) slices.reduced_shared = layout.book<float>(rows);
    if (plan.residual) slices.reduced_residual = layout.book<float>(rows);
  }
  if (!plan.stages.finishes_apart) return;
  slices.routed_sum =
      layout.book<float>(elements(tokens, plan.stages.routed_sum_stride, "routed_sum"));
  if (spec.latent.size != 0) {
    slices.projected = layout.book<float>(elements(tokens, spec.hidden_size, "projected"));
  }
}

}  // namespace

int64_t dispatched_rows_per_token(const MoeSpec& spec) {
  return spec.weight_on == WeightOn::kInput ? spec.top_k : 1;
}

StagePlan plan_stages(const LayerPlan& plan) {
  const MoeSpec& spec = plan.spec;
  const SharedMode mode = spec.shared.mode;
  const bool is_latent = spec.latent.size != 0;
  StagePlan stages;
  stages.has_expert_input = is_latent || spec.weight_on == WeightOn::kInput;
  stages.rows_per_token = dispatched_rows_per_token(spec);
  stages.finishes_apart = is_latent || plan.part.reduces();
  stages.weighs_shared_rows = mode == SharedMode::kRouterWeight || mode == SharedMode::kFusedSlots;
  stages.mixes = mode == SharedMode::kAverage || mode == SharedMode::kSoftmaxMix;
  stages.routed_sum_stride = round_up(expert_width(spec), kFloatsPerVector);
  const experts::ExpertsKernel* reader = is_latent ? nullptr : plan.experts.get();
  if (reader == nullptr) reader = plan.shared ? plan.shared.get() : plan.residual.get();
  stages.reads_hidden_rows = !stages.has_expert_input || plan.shared || plan.residual;
  if (stages.reads_hidden_rows) stages.hidden_rows = reader->requirements();
  return stages;
}

void book_workspace(LayerPlan& plan) {
  WorkspaceLayout layout;
  book_routing(plan, layout, plan.slices);
  book_inputs(plan, layout, plan.slices);
  book_experts(plan, layout, plan.slices);
  book_sums(plan, layout, plan.slices);
  plan.chunk_workspace_bytes = layout.total_bytes();
  plan.workspace_bytes =
      plan.chunk_workspace_bytes * (plan.chunk_order == ChunkOrder::kByTwos ? 2 : 1);
}

}  // namespace conclave::inline v0
