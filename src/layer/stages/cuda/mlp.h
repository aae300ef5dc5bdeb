// Experts of one kind on CUDA: their input rows and their products.
#pragma once

#include "layer/stages/cuda/chunk.h"
#include "layer/stages/cuda/route.h"

#include <cstdint>

namespace conclave::inline v0 {

// Experts of one kind with their plan, weights, kernels and scratch memory.
struct CudaMlp {
  const CudaMlpPlan& plan;
  const CudaMlpWeights& weights;
  const std::vector<CudaRung>& rungs;
  const MlpSlices& slices;
  const int32_t* every_row = nullptr;  // ids of experts that every row uses
};
CudaMlp routed_mlp(const CudaCall& call);
CudaMlp shared_mlp(const CudaCall& call);    // for a plan with shared experts
CudaMlp residual_mlp(const CudaCall& call);  // for a plan with a residual MLP

// Rows of any float type, [count * rows_per_token, columns].
struct SourceRows {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;  // elements
  bool given = false;  // the caller's own, ready before the call's first launch
  // If above 1, row t * rows_per_token + s belongs to slot s alone.
  int64_t rows_per_token = 1;
};

// The rows of the call's chunk.
inline SourceRows source_rows(const CudaCall& call, const ConstTensorView& rows) {
  return {.data = chunk_data(call, rows),
          .dtype = rows.dtype,
          .stride = stride_of_rows(rows),
          .given = true};
}

// State of the routed rows: rows of slots that await their sum, finished sums, or the output itself
// (one slot per token and nothing to add).
enum class RoutedRows : uint8_t { kAwaitSum, kAreSums, kAreOutput };

// Enqueues the routed experts on the grouped rows; enqueues nothing on a rank without experts.
RoutedRows run_routed(const CudaCall& call, const CudaRouting& routing);
// The sums of RoutedRows::kAreSums.
experts::RowSums routed_sums(const CudaCall& call);
// Enqueues shared experts or the residual MLP on every row, slot t * S + i for expert i.
void run_on_every_row(const CudaCall& call, const CudaMlp& mlp, const CudaRouting& routing,
                      const SourceRows& source);

}  // namespace conclave::inline v0
