// Plan time of a layer on CUDA: what it can do, its ladder over tokens, its scratch memory. Nothing
// here touches the device, so that any machine can test it.
#pragma once

#include "core/workspace_layout.h"
#include "layer/cuda/ladder.h"
#include "layer/rank_part.h"

#include "conclave/layer.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace conclave::inline v0 {

// Where each stage finds its scratch memory; offsets are multiples of 256 bytes. The single-launch
// kernel for few tokens uses the front of the workspace, its counters included, and nothing else.
struct CudaSlices {
  WorkspaceSlice live_tokens;    // [1] int64 of a chunk, where num_tokens is given
  WorkspaceSlice gate;           // of a gate product whose input is normed
  WorkspaceSlice logits;         // [T, logits] f32
  WorkspaceSlice topk_ids;       // [T, k] int32
  WorkspaceSlice topk_weights;   // [T, k] f32
  WorkspaceSlice given_ids;      // [T, k] int32: choices that the router only weighs
  WorkspaceSlice identity;       // [T] f32: weights of zero experts
  WorkspaceSlice hidden_rows;    // [T, H] in the experts' type, where hidden has another
  WorkspaceSlice hidden_scales;  // of e4m3 rows
  WorkspaceSlice group;
  WorkspaceSlice experts;
  WorkspaceSlice expert_rows;    // [T * k, H]
  WorkspaceSlice shared_rows;    // [T, H]
  WorkspaceSlice shared_factor;  // [T] f32
};

// What the kernels of the ladder need of the workspace.
struct KernelBytes {
  size_t routed = 0;
  size_t shared = 0;
  size_t decode = 0;  // with the counters at its front
};

struct CudaPlan {
  MoeSpec spec;
  ParallelSpec parallel;
  LayerOptions options;
  cuda::DeviceInfo device;
  RankPart part;
  experts::DeviceExpertsProblem routed;
  std::optional<experts::DeviceExpertsProblem> shared;  // one expert that every row uses
  std::vector<LadderRung> ladder;
  std::vector<LadderRung> shared_ladder;
  int64_t decode_tokens = 0;  // calls up to here take the single launch, where what they ask for
                              // lets them; 0: none does
  int64_t row_stride = 0;     // elements of a 16-bit row of H, a multiple of 16 bytes
  DType row_dtype = DType::kBF16;  // of expert rows, and of hidden rows that are not quantised
  Plan summary;
};

struct CudaPlanRequest {
  const MoeSpec& spec;
  const LayerOptions& options;
  const ParallelSpec& parallel;
  const cuda::DeviceInfo& device;
};

// Throws as plan_layer; Error(kUnsupported) lists every part of the layer that CUDA lacks.
CudaPlan plan_cuda_layer(const CudaPlanRequest& request);
// Fills workspace_bytes and the rungs of the summary. `bytes_for` says what the kernels need for
// calls of up to that many tokens.
void summarise_workspace(CudaPlan& plan,
                         const std::function<KernelBytes(int64_t tokens)>& bytes_for);
// Every kernel and tile that could serve calls of `tokens` tokens.
std::vector<TuningEntry> list_candidates(const CudaPlan& plan, int64_t tokens);
// As far as it comes, with the reasons in its rows.
Plan summarise_cuda_plan(const CudaPlanRequest& request);

}  // namespace conclave::inline v0
