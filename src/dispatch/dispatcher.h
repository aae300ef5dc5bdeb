// The dispatch seam: brings each row to the ranks that own its experts, groups rows by local
// expert, and brings the results home as one weighted sum per token.
#pragma once

#include "core/catalog.h"
#include "core/flow.h"
#include "dispatch/finish.h"

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/error.h"
#include "conclave/layer.h"
#include "conclave/placement.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0::dispatch {

struct DispatchProblem {
  int64_t max_tokens = 0;  // per rank and call
  int64_t top_k = 0;
  // If every choice of a token has its own row, each row is dispatched as a token with one choice,
  // and combine adds up this many successive rows.
  int64_t rows_per_sum = 1;
  int64_t num_experts = 0;  // physical experts
  int64_t hidden_size = 0;
  int64_t row_bytes = 0;  // bytes per RowBundle row
  DType row_dtype = DType::kF32;
  int32_t ep_size = 1;
  int32_t ep_rank = 0;
  PlacementStrategy placement = PlacementStrategy::kLinear;
  std::vector<int32_t> rank_of = {};  // for kCustom
  Reduce reduce = Reduce::kFull;      // kPartial: no exchange, experts of other ranks add nothing
  EpTransport transport = EpTransport::kVariable;
  EpCombine combine = EpCombine::kUnreduced;
  Communicator* communicator = nullptr;  // needed when ep_size > 1 and kFull
};
// Throws Error(kInvalidArgument).
ExpertPlacement placement_of(const DispatchProblem& problem);

struct CombineArgs {
  ExpertOutput output;
  Routing routing;         // as given to dispatch
  FinishArgs finish = {};  // terms added before the one rounding
  TensorView out;          // [T / rows_per_sum, H] f32, f16 or bf16, rows may be strided
};

// State between dispatch and combine lives in the workspace, so that a Dispatcher is immutable and
// concurrent calls with distinct workspaces are safe (on a single rank; with a communicator only
// one at a time). dispatch and combine get the same workspace of workspace_bytes().
class Dispatcher {
 public:
  virtual ~Dispatcher() = default;

  virtual int64_t num_local_experts() const = 0;
  // Upper bound of occupied slots (and of num_slots) that one dispatch can deliver; for contiguous
  // layouts tokens * min(k, E_local) * ep.
  virtual int64_t max_slots() const = 0;
  virtual size_t workspace_bytes() const = 0;
  // Ids outside [0, E) contribute nothing. Collective when ep_size > 1 and kFull.
  virtual ExpertBatch dispatch(const Routing& routing, const RowBundle& rows,
                               std::span<std::byte> workspace, Executor& executor) const = 0;
  // out[t] = round(finish(sum over slots 0..k-1 of weight * row, float32)); a token whose ids are
  // all skipped has the sum 0. With rows_per_sum a token's slots are those of all its rows, in
  // order.
  virtual void combine(const CombineArgs& args, std::span<std::byte> workspace,
                       Executor& executor) const = 0;
};

struct DispatcherRow {
  std::string_view name;  // "local", "ep.fixed_slots", "ep.variable"
  Support (*supports)(const DispatchProblem& problem);
  std::unique_ptr<Dispatcher> (*make)(const DispatchProblem& problem);
};
Catalog<DispatcherRow> dispatcher_catalog();

}  // namespace conclave::inline v0::dispatch
