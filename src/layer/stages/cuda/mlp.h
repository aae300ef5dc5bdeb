// Experts of one kind on CUDA: their input rows and their products.
#pragma once

#include "layer/stages/cuda/chunk.h"
#include "layer/stages/cuda/route.h"
#include "layer/stages/cuda/rows.h"

#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

// Experts of one kind with their plan, weights, kernels and scratch memory.
struct CudaMlp {
  const CudaMlpPlan& plan;
  const CudaMlpWeights& weights;
  const std::vector<CudaRung>& rungs;
  const MlpBuffers& buffers;
  const int32_t* every_row = nullptr;  // ids of experts that every row uses
};
CudaMlp shared_mlp(const CudaChunk& chunk);    // for a plan with shared experts
CudaMlp residual_mlp(const CudaChunk& chunk);  // for a plan with a residual MLP

// State of the routed rows: rows of slots that await their sum, finished sums, or the output itself
// (one slot per token and nothing to add).
enum class RoutedRows : uint8_t { kAwaitSum, kAreSums, kAreOutput };

// Enqueues the routed experts on the grouped rows of `hidden`; enqueues nothing on a rank without
// experts. Writes `out` if the down product can finish rows: an empty `out` keeps it from that.
RoutedRows run_routed(const CudaChunk& chunk, const ConstTensorView& hidden,
                      const CudaRouting& routing, const TensorView& out);
// The sums of RoutedRows::kAreSums.
experts::RowSums routed_sums(const CudaChunk& chunk);
// Enqueues shared experts or the residual MLP on every row, slot t * S + i for expert i.
void run_on_every_row(const CudaChunk& chunk, const CudaMlp& mlp, const int64_t* live_tokens,
                      const SourceRows& source);

}  // namespace conclave::inline v0
