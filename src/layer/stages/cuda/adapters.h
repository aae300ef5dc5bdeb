// Rows with adapters: which tokens have one, and the products of their experts.
#pragma once

#include "layer/stages/cuda/chunk.h"
#include "layer/stages/cuda/mlp.h"
#include "layer/stages/cuda/route.h"

#include "conclave/layer.h"

#include <cstdint>

namespace conclave::inline v0 {

// The marks of a chunk's tokens; without a table, or with neither marks nor a mark, none has an
// adapter.
struct CudaMarks {
  const CudaAdapterTable* table = nullptr;
  const int32_t* by_token = nullptr;  // [T], or null
  int32_t mark = 0;                   // that all tokens have

  bool any() const { return table != nullptr && (by_token != nullptr || mark != 0); }
};

// Looks up the ids of a call that names adapters. May enqueue a launch.
CudaMarks enqueue_marks(const CudaChunk& chunk, const ForwardArgs& args, const LiveRows& live);

// The kernel for rows with adapters, where it computes every row of a call: those without one have
// its arithmetic, or there are none. It then also decides how rows are grouped. Null otherwise.
const CudaAdapterRung* rung_of_every_row(const CudaAdapterKernels& kernels, const CudaMarks& marks,
                                         int64_t tokens);

// The rows of a token, before they are weighed or take an expert's order, and as experts read them.
struct AdaptedSource {
  SourceRows tokens;
  SourceRows rows;
  bool only_marked = false;  // the grouping has none of tokens without an adapter
};

// A routing of few tokens in two, for the single launch and for the kernel of rows with adapters;
// the latter's choices are grouped.
struct SplitRouting {
  CudaRouting others;
  CudaRouting marked;
};
SplitRouting split_by_marks(const CudaChunk& chunk, const CudaRouting& routing,
                            const CudaMarks& marks);

// Works as run_experts, for a call with marks. Results are stored in rows of slots.
RoutedRows run_adapted_experts(const CudaChunk& chunk, const CudaRouting& routing,
                               const CudaMarks& marks, const AdaptedSource& source);

// Experts that every row uses, behind kernels that know of no adapters or in the place of these.
void run_adapted_shared(const CudaChunk& chunk, const GroupedRows& groups, const CudaMarks& marks,
                        const int64_t* live_tokens, const AdaptedSource& source);

// Copies rows of tokens that have an adapter to the output of the single launch.
void select_adapted_rows(const CudaChunk& chunk, const CudaMarks& marks, const LiveRows& live,
                         const TensorView& adapted, const TensorView& out);

}  // namespace conclave::inline v0
