// Experts of one kind on CUDA: their input rows and their products.
#pragma once

#include "layer/stages/cuda/chunk.h"
#include "layer/stages/cuda/route.h"
#include "layer/stages/cuda/rows.h"

#include "conclave/tensor.h"

#include <cstdint>

namespace conclave::inline v0 {

struct CudaMarks;

// Experts of one kind with their plan, weights, kernels and scratch memory.
struct CudaMlp {
  const CudaMlpPlan& plan;
  const CudaMlpWeights& weights;
  const std::vector<CudaRung>& rungs;
  const MlpBuffers& buffers;
  const int32_t* every_row = nullptr;  // ids of experts that every row uses
};
CudaMlp routed_mlp(const CudaChunk& chunk);
CudaMlp shared_mlp(const CudaChunk& chunk);    // for a plan with shared experts
CudaMlp residual_mlp(const CudaChunk& chunk);  // for a plan with a residual MLP

// Rows that the routed experts have made, of `columns` elements each.
struct RoutedRows {
  // [T * k] rows of slots that await their sum; [T] sums in float32; or the output itself (one slot
  // per token and nothing to add).
  enum class Form : uint8_t { kAwaitSum, kAreSums, kAreOutput };
  Form form = Form::kAwaitSum;
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;  // elements
  int64_t columns = 0;
};

// Each enqueues a stage of the routed experts and returns the rows that it makes.
// `hidden` times the latent down projection, [T, Hl] float32.
SourceRows project_down(const CudaChunk& chunk, const SourceRows& hidden);
// Rows, one per slot: each multiplied by the slot's weight, as its expert reads it, or both.
SourceRows rows_of_slots(const CudaChunk& chunk, const CudaRouting& routing,
                         const SourceRows& rows);
// The rows as the kernel reads them: given ones, or converted, quantised or sorted copies.
DeviceRows kernel_rows(const CudaChunk& chunk, const CudaMlp& mlp, const GroupedRows& groups,
                       const int64_t* live_tokens, const SourceRows& source);
// The products. Writes `out` if the down product can finish rows: an empty `out` keeps it from
// that.
RoutedRows run_experts(const CudaChunk& chunk, const CudaRouting& routing, const DeviceRows& input,
                       const TensorView& out);
// Works as run_experts where every row of a slot is to be stored.
RoutedRows store_experts(const CudaChunk& chunk, const CudaRouting& routing,
                         const DeviceRows& input);
// The rows of slots where no experts are: nothing is enqueued, and no slot names one of them.
RoutedRows no_rows(const CudaChunk& chunk);

// Enqueues the making of codes that are to travel: row r's begin at r * block_bytes, and so do its
// scales, a multiple of 4 bytes apart.
struct CodesInBlocks {
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  int64_t block_bytes = 0;
};
void make_codes(const CudaChunk& chunk, const CudaMlp& mlp, const SourceRows& source,
                const CodesInBlocks& to);

// Kernels with adapters share these steps with the others.
// The rows in the caller's order: plain ones, their codes and scales, or the codes' values.
DeviceRows unsorted_rows(const CudaChunk& chunk, const CudaMlp& mlp, const SourceRows& source);
experts::DeviceExpertsCall experts_call(const CudaChunk& chunk, const CudaMlp& mlp,
                                        const GroupedRows& groups, const DeviceRows& rows);
// The rows of slots that the down product stores.
RoutedRows stored_rows(const CudaChunk& chunk);

// Enqueues shared experts or the residual MLP on every row. Returns row t * S + i for expert i.
SourceRows run_on_every_row(const CudaChunk& chunk, const CudaMlp& mlp, const int64_t* live_tokens,
                            const SourceRows& source, const CudaMarks& marks);

}  // namespace conclave::inline v0
