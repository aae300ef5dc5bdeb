// Plan time: every choice a layer makes, and the objects that carry it out.
#pragma once

#include "core/workspace_layout.h"
#include "cpu/isa.h"
#include "dispatch/dispatcher.h"
#include "experts/experts_kernel.h"

#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/routing.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace conclave::inline v0 {

// Where each stage finds its scratch memory.
struct LayerSlices {
  WorkspaceSlice logits;        // [T, E] f32
  WorkspaceSlice topk_ids;      // [T, k] int32
  WorkspaceSlice topk_weights;  // [T, k] f32
  WorkspaceSlice rows;          // RowBundle for the experts
  WorkspaceSlice gate_rows;     // float32 RowBundle for gate products, where the format differs
  WorkspaceSlice dispatch;
  WorkspaceSlice experts;        // shared by routed and shared experts, one after the other
  WorkspaceSlice expert_rows;    // [slots, H] f32
  WorkspaceSlice shared_rows;    // [T, H] f32
  WorkspaceSlice shared_gate;    // [T] f32
  WorkspaceSlice shared_source;  // [T] int64: the identity batch
};

struct LayerPlan {
  MoeSpec spec;
  ParallelSpec parallel;
  LayerOptions options;
  cpu::Isa isa = cpu::Isa::kScalar;
  cpu::Arithmetic arithmetic = cpu::Arithmetic::kF32Fma;

  std::unique_ptr<Router> router;
  std::unique_ptr<dispatch::Dispatcher> dispatcher;
  std::unique_ptr<experts::ExpertsKernel> experts;
  std::unique_ptr<experts::ExpertsKernel> shared;  // one expert; null without shared experts

  LayerSlices slices;
  size_t workspace_bytes = 0;
  int64_t gate_row_bytes = 0;  // of a float32 row, zero padded
  int64_t shared_row_stride = 0;
  Plan summary;
};

// Throws Error(kUnsupported) listing every row's reason where no row of a table fits, and the
// errors of validate().
LayerPlan plan_layer(const Context& context, const MoeSpec& spec, const LayerOptions& options,
                     const ParallelSpec& parallel);

}  // namespace conclave::inline v0
