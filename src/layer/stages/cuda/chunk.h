// Enqueues one chunk of tokens on CUDA, in the order of its stages.
#pragma once

#include "core/rank_counts.h"
#include "experts/cuda/adapters/adapter_kernel.h"
#include "experts/cuda/common/round_rows.h"
#include "experts/cuda/one_launch.h"
#include "layer/cuda/adapter_memory.h"
#include "layer/cuda/every_row.h"
#include "layer/cuda/plan.h"
#include "layer/cuda/weights.h"
#include "layer/stages/cuda/call_limits.h"
#include "layer/stages/cuda/cuda_stages.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace conclave::inline v0 {

// A rung with its kernel, bound to the layer's weights.
struct CudaRung {
  int64_t last_tokens = 0;
  const experts::DeviceExpertsKernel* kernel = nullptr;
  bool sorted_input = false;   // the input that the kernel's tile wants
  bool adds_rows = false;      // to the buffer of sums, in any order
  bool finishes_rows = false;  // can write the output itself
  // Set if quantised rows are values of bf16, not codes: how they become these.
  std::optional<experts::RowRounding> rounding = {};
  bool rows_in_lanes = false;  // codes of rows lie as those of weights
  // Launched as well, for the tiles that skewed choices are cut into; or null.
  const experts::DeviceExpertsKernel* skewed = nullptr;
};

// A rung of kernels for rows with adapters.
struct CudaAdapterRung {
  int64_t last_tokens = 0;
  const experts::AdapterKernel* kernel = nullptr;
  bool in_one_pass = false;  // serves the other rows as well
};
struct CudaAdapterKernels {
  std::vector<std::unique_ptr<experts::AdapterKernel>> owned;
  std::vector<CudaAdapterRung> rungs;  // empty: no row has an adapter
  std::vector<CudaRung> rows;          // the same, as their input rows are made
};

// The kernels of a layer, made once beside its weights.
struct CudaKernels {
  std::vector<std::unique_ptr<experts::DeviceExpertsKernel>> owned;
  std::vector<CudaRung> routed;
  std::vector<CudaRung> shared;
  std::vector<CudaRung> residual;
  CudaAdapterKernels routed_adapters;
  CudaAdapterKernels shared_adapters;
  std::unique_ptr<experts::OneLaunchKernel> decode;  // null if it cannot or must not serve
};

// Also lets all other kernels of the plan have what they need, so that a forward asks the driver
// for nothing. On the current device.
CudaKernels make_cuda_kernels(const CudaPlan& plan, const CudaWeights& weights);

// Kernels add to these on the device.
struct CudaCounters {
  uint64_t skipped_ids = 0;
  uint64_t tokens_without_finite_logit = 0;
};

// The adapters of a call: all that it may name, or none, and the mark of all its tokens where they
// have one adapter.
struct CudaCallAdapters {
  const CudaAdapterTable* table = nullptr;
  int32_t mark = 0;
};

// A layer as it stands between calls, and the place of one chunk: what every stage may ask for. The
// caller's tensors and what stages make are not here: a stage is given what it reads and returns
// what it makes.
struct CudaChunk {
  const CudaPlan& plan;
  const CudaWeights& weights;
  const EveryRowIds& every_row;
  const CudaKernels& kernels;
  CudaScratch scratch;  // what the stage at work is given
  int64_t begin = 0;    // first token of the chunk
  int64_t count = 0;    // tokens of the chunk, at most plan.options.max_tokens
  bool is_whole_call = true;
  RankCounts rank_counts = {};       // tokens of each rank in the chunk, if rows travel
  CudaCounters* counters = nullptr;  // on the device
  CudaCallAdapters adapters = {};
  CUstream_st* stream = nullptr;
  CudaCallLimits limits = {};

  // The chunk for a stage, which then has the buffers that the plan's list gives it.
  CudaChunk at(CudaStage stage) const {
    CudaChunk own = *this;
    own.scratch = scratch.only(plan.stages.buffers_of(stage));
    return own;
  }
  bool runs(CudaStage stage) const {
    return plan.stages.has(stage) && count <= plan.stages.of(stage).most_tokens;
  }
};

// Enqueues everything; `args` are the chunk's rows. Allocates nothing and waits for nothing.
void run_cuda_chunk(const CudaChunk& chunk, const ForwardArgs& args);
// Before that, for a call with a budget of experts: routes the chunk and adds its choices up.
void count_cuda_chunk(const CudaChunk& chunk, const ForwardArgs& args);

}  // namespace conclave::inline v0
