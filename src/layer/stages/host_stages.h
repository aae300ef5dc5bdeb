// The stages of a layer on the CPU and the buffers between them.
#pragma once

#include "core/workspace_layout.h"
#include "layer/stages/table.h"

#include "conclave/spec.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

struct LayerPlan;
struct StageFacts;

// In the order of a chunk.
enum class HostStage : uint8_t {
  kHidden,
  kRoute,
  kInput,  // what the experts read, if it is not hidden itself
  kSendRows,
  kFillWait,  // kFactors to kResidual, if rows have not come
  kExperts,
  kSendResults,
  kFactors,
  kShared,
  kResidual,
  kCombine,  // where more passes follow
  kSumRanks,
  kNorm,
  kLatentUp,
  kFinish,
};
inline constexpr size_t kHostStages = static_cast<size_t>(HostStage::kFinish) + 1;
using HostStages = StageList<HostStage, kHostStages>;

// W is expert_width(spec).
enum class HostBuffer : uint8_t {
  kHiddenRows,    // RowBundle of hidden for kernels
  kHiddenFloats,  // float32 RowBundle of hidden for gates and projections, if kernels read others
  kGateRows,      // the same of router_input, or normalised
  kLogits,        // [T, num_logits(spec)] f32
  kGivenIds,      // [T, k] int32: choices that the router only weighs
  kTokenIds,      // [T] int32, if the router may read them
  kRouterScratch,
  kTopkIds,        // [T, k] int32
  kTopkWeights,    // [T, k] f32
  kSharedWeights,  // [T, S] f32, for kRouterWeight and kFusedSlots
  kLatent,         // [T, Hl] f32
  kExpertInput,    // RowBundle for the experts, if it is not kHiddenRows
  kUnitWeights,    // [T, k] f32, if the experts' input was weighted
  kPhysicalIds,    // [T, k] int32, for a layer with redundant experts
  kDispatch,
  kExpertScratch,
  kExpertRows,   // [slots, W] f32
  kRoutedSum,    // [T, routed_sum_stride] f32, if combine does not finish
  kSharedIndex,  // EveryRowIndex of the shared experts
  kSharedScratch,
  kSharedRows,     // [S, T, H] f32
  kSharedFactor,   // [T] f32
  kMixLogits,      // [T, 2] f32, for kSoftmaxMix
  kMix,            // [T] f32: factor of the routed part
  kReducedShared,  // the sum of shared rows over tensor-parallel ranks
  kResidualInput,  // RowBundle of residual_input
  kResidualIndex,  // EveryRowIndex of the residual MLP
  kResidualScratch,
  kResidualRows,     // [T, H] f32
  kReducedResidual,  // the sum of residual rows over tensor-parallel ranks
  kIdentityWeights,  // [T] f32: weights of zero experts
  kReducedSum,       // kRoutedSum, summed over tensor-parallel ranks
  kProjected,        // [T, H] f32: the routed sum after the latent up projection
};
inline constexpr size_t kHostBuffers = static_cast<size_t>(HostBuffer::kProjected) + 1;
using HostSlices = std::array<WorkspaceSlice, kHostBuffers>;
using HostScratch = Scratch<HostBuffer>;

// The plan's kernels, parts and facts must be chosen before.
HostStages declare_stages(const LayerPlan& plan);

// Rows that dispatch takes per token: k if each choice reads a row of its own, otherwise 1.
int64_t dispatched_rows_per_token(const MoeSpec& spec);

// Derives from spec and kernels what a layer does beyond the plain weighted sum of its experts.
StageFacts stage_facts(const LayerPlan& plan);

// Declares the stages, books every buffer for max_tokens and lists both in the summary. The
// kernels, the dispatcher, the facts and the order of chunks must be chosen before. Throws
// Error(kSizeOverflow).
void book_workspace(LayerPlan& plan);

}  // namespace conclave::inline v0
