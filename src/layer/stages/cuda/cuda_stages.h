// The stages of a layer on CUDA and the buffers between them.
#pragma once

#include "core/workspace_layout.h"
#include "layer/stages/table.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

struct CudaPlan;

// In the order of a chunk. kOneLaunch ends the chunks that it takes, which kRoute has not grouped;
// those after it are for others.
enum class CudaStage : uint8_t {
  kLive,
  kFactors,
  kLogits,
  kRoute,
  kMarks,
  kOneLaunch,
  kLatentDown,
  kGather,  // where rows travel: the stages up to kBringHome have the tokens of all ranks
  kRowsOfSlots,
  kInput,
  kExperts,
  kExpertPart,
  kBringHome,
  kShared,
  kResidual,
  kSum,  // before the projection up
  kNorm,
  kFinish,
  kSelect,    // rows of the single launch stay where no adapter is
  kSumRanks,  // where ranks add up: what the stages before call the output is a part
  kRound,
};
inline constexpr size_t kCudaStages = static_cast<size_t>(CudaStage::kRound) + 1;

// In the order of the workspace. Kernels overlap: one may begin to write before those in front of
// it have read, so no two buffers share memory, whatever their stages.
enum class CudaBuffer : uint8_t {
  kCounters,        // where blocks of the single launch meet
  kCallBans,        // sums and flags of experts, for all chunks of a call with limits
  kLiveTokens,      // [1] int64 for a chunk, if num_tokens is given
  kGate,            // for a gate product with a normalised input
  kLogits,          // [T, logits] f32
  kTopkIds,         // [T, slots] int32
  kTopkWeights,     // [T, slots] f32
  kGivenIds,        // [T, k] int32: choices that the router only weighs
  kPhysicalIds,     // [T, k] int32, for a layer with redundant experts
  kRouterIds,       // [T, k] int32: what a router writes that another launch checks
  kRouterWeights,   // [T, k] f32, likewise
  kLimitedIds,      // [T, k] int32: what the limits of a call leave of them
  kLimitedWeights,  // [T, k] f32, likewise
  kIdentity,        // [T] f32: weights of zero experts
  kSharedFactor,    // [T, S] f32
  kMixLogits,       // [T, 2] f32, for SharedMode::kSoftmaxMix
  kMix,             // [T] f32: factor of the routed part
  kGroup,
  kExperts,  // scratch of the kernels, for all kinds of experts, one after the other
  // Each kind of experts has four buffers: input rows, if they are neither the caller's own nor
  // sorted; scales of rows of codes; rows of slots, [T * k, H]; and for rungs that add rows their
  // sums, [T, H] f32.
  kRoutedRows,
  kRoutedScales,
  kRoutedOutput,
  kRoutedSums,
  kSharedRows,
  kSharedScales,
  kSharedOutput,
  kSharedSums,
  kResidualRows,
  kResidualScales,
  kResidualOutput,
  kResidualSums,
  // A row for each slot: times the slot's weight, in f32, or as its expert reads it, in f32 where
  // it becomes codes and else in bf16.
  kWeighted,
  kSharedOwn,  // the latter, for shared experts
  kLatent,     // [T, Hl] f32: projected rows, then the sums of experts
  kProjected,  // [T, H] f32: sums projected up
  kOneLaunch,  // scratch of the single launch
  // Where ranks add up, [T, padded H] f32 each: what this rank has computed, of all and of shared
  // experts apart, and the sums.
  kRankPart,
  kRankSharedPart,
  kRankSum,
  kRankSharedSum,
  // For calls that name adapters, whose parts use these one after the other.
  kAdapterMarks,  // [T] int32: which adapter each token has
  kAdapterIds,    // [T, slots] int32: choices of tokens that have one
  kOtherIds,      // [T, slots] int32: those of the others, for the single launch
  kAdapterGroup,  // how the former are grouped
  kAdapterInput,  // input rows and scales, as kRoutedRows and kRoutedScales
  kAdapterScales,
  kAdapterUp,  // [T * slots] RowFactors and float32 terms, of gate and up
  kAdapterUpTerms,
  kAdapterDown,  // the same of down
  kAdapterDownTerms,
  kAdapterOut,  // [T, H] of up to 4 bytes: output beside that of the single launch
  // Where rows travel between ranks, N the tokens of all of them: rows with their ids and weights,
  // as they came; ids and weights by themselves, [N, k]; what this rank's experts add to every
  // token, [N, padded Hl] f32; the same of the other ranks for this rank's tokens; their sums.
  kGatheredRows,
  kGatheredIds,
  kGatheredWeights,
  kGatheredMarks,
  kExpertPart,
  kOtherParts,
  kExpertSums,
};
inline constexpr size_t kCudaBuffers = static_cast<size_t>(CudaBuffer::kExpertSums) + 1;
using CudaSlices = std::array<WorkspaceSlice, kCudaBuffers>;
using CudaScratch = Scratch<CudaBuffer>;

// The buffers of one kind of experts.
struct MlpBuffers {
  CudaBuffer rows;
  CudaBuffer scales;
  CudaBuffer output;
  CudaBuffer sums;
};
inline constexpr MlpBuffers kRoutedBuffers = {CudaBuffer::kRoutedRows, CudaBuffer::kRoutedScales,
                                              CudaBuffer::kRoutedOutput, CudaBuffer::kRoutedSums};
inline constexpr MlpBuffers kSharedBuffers = {CudaBuffer::kSharedRows, CudaBuffer::kSharedScales,
                                              CudaBuffer::kSharedOutput, CudaBuffer::kSharedSums};
inline constexpr MlpBuffers kResidualBuffers = {
    CudaBuffer::kResidualRows, CudaBuffer::kResidualScales, CudaBuffer::kResidualOutput,
    CudaBuffer::kResidualSums};

// Rows that have adapters are read from buffers of their own.
inline constexpr MlpBuffers kAdaptedRoutedBuffers = {
    CudaBuffer::kAdapterInput, CudaBuffer::kAdapterScales, CudaBuffer::kRoutedOutput,
    CudaBuffer::kRoutedSums};
inline constexpr MlpBuffers kAdaptedSharedBuffers = {
    CudaBuffer::kAdapterInput, CudaBuffer::kAdapterScales, CudaBuffer::kSharedOutput,
    CudaBuffer::kSharedSums};

using CudaStages = StageList<CudaStage, kCudaStages>;

// The parts and kernels of the plan must be chosen before.
CudaStages declare_stages(const CudaPlan& plan);

// The buffers that calls of max_tokens tokens need, with the stages that touch them.
std::vector<PlanBuffer> describe_buffers(const CudaStages& stages, const CudaSlices& slices);

}  // namespace conclave::inline v0
