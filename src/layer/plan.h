// Plan time: every choice a layer makes, and the objects that carry it out.
#pragma once

#include "core/workspace_layout.h"
#include "cpu/isa.h"
#include "dispatch/dispatcher.h"
#include "experts/kernel.h"
#include "layer/plan_base.h"

#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/routing.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace conclave::inline v0 {

// The scratch memory of each stage.
struct LayerSlices {
  WorkspaceSlice logits;        // [T, num_logits(spec)] f32
  WorkspaceSlice topk_ids;      // [T, k] int32
  WorkspaceSlice topk_weights;  // [T, k] f32
  WorkspaceSlice physical_ids;  // [T, k] int32, for a layer with redundant experts
  WorkspaceSlice given_ids;     // [T, k] int32: choices that the router only weighs
  WorkspaceSlice token_ids;     // [T] int32, if the router may read them
  WorkspaceSlice router_scratch;
  WorkspaceSlice rows;       // RowBundle for the experts
  WorkspaceSlice gate_rows;  // float32 RowBundle for gate products, if the format differs
  WorkspaceSlice dispatch;
  WorkspaceSlice experts;           // shared by all kernels, one after the other
  WorkspaceSlice expert_rows;       // [slots, W] f32, W = expert_width(spec)
  WorkspaceSlice all_rows;          // [S, T] int64: source rows of S experts on every row
  WorkspaceSlice all_rows_begin;    // [S] int64
  WorkspaceSlice all_rows_count;    // [S] int64
  WorkspaceSlice shared_rows;       // [S, T, H] f32
  WorkspaceSlice shared_gate;       // [T] f32
  WorkspaceSlice shared_weights;    // [T, S] f32, for kRouterWeight and kFusedSlots
  WorkspaceSlice mix_logits;        // [T, 2] f32, for kSoftmaxMix
  WorkspaceSlice mix;               // [T] f32: factor of the routed part
  WorkspaceSlice identity_weights;  // [T] f32: weights of zero experts
  WorkspaceSlice latent;            // [T, Hl] f32
  WorkspaceSlice expert_input;      // RowBundle for the experts, if it is not `rows`
  WorkspaceSlice unit_weights;      // [T, k] f32, if the experts' input was weighted
  WorkspaceSlice residual_input;    // RowBundle of residual_input
  WorkspaceSlice residual_rows;     // [T, H] f32
  WorkspaceSlice routed_sum;        // [T, routed_sum_stride] f32, if combine does not finish
  WorkspaceSlice projected;         // [T, H] f32: routed_sum after the latent up projection
  WorkspaceSlice reduced_sum;       // routed_sum, summed over tensor-parallel ranks
  WorkspaceSlice reduced_shared;    // shared_rows of one expert, likewise
  WorkspaceSlice reduced_residual;  // residual_rows, likewise
};

// The work of a layer beyond the plain weighted sum of its routed experts.
struct StagePlan {
  bool reads_hidden_rows = true;           // some kernel reads hidden itself, in its row format
  bool has_expert_input = false;           // routed experts read other rows: projected or weighted
  int64_t rows_per_token = 1;              // rows dispatch takes: k if every choice has its own
  bool finishes_apart = false;             // combine writes routed_sum; one more pass makes out
  bool weighs_shared_rows = false;         // shared_weights apply
  bool mixes = false;                      // `mix` applies
  experts::BatchRequirements hidden_rows;  // format of `rows`
  int64_t routed_sum_stride = 0;
};

struct LayerPlan : PlanBase {
  cpu::Isa isa = cpu::Isa::kScalar;
  cpu::Arithmetic arithmetic = cpu::Arithmetic::kF32Fma;

  std::unique_ptr<Router> router;
  std::unique_ptr<dispatch::Dispatcher> dispatcher;
  std::unique_ptr<experts::ExpertsKernel> experts;
  std::unique_ptr<experts::ExpertsKernel> shared;    // S experts; null without shared experts here
  std::unique_ptr<experts::ExpertsKernel> residual;  // one expert; null without a residual MLP here

  StagePlan stages;
  size_t router_scratch_bytes = 0;
  LayerSlices slices;
  ChunkOrder chunk_order = ChunkOrder::kInTurn;
  size_t chunk_workspace_bytes = 0;  // what the slices take
  size_t workspace_bytes = 0;        // for all chunks under way at once
  int64_t gate_row_bytes = 0;        // bytes per float32 row, zero padded
};

// Throws Error(kUnsupported) listing every row's reason if no row of a table fits, and the errors
// of validate().
LayerPlan plan_layer(const Context& context, const MoeSpec& spec, const LayerOptions& options,
                     const ParallelSpec& parallel);
// The plan in words; if no row of a table fits, the plan up to that table.
Plan summarise_plan(const Context& context, const MoeSpec& spec, const LayerOptions& options,
                    const ParallelSpec& parallel);

}  // namespace conclave::inline v0
