// The dispatch seam: brings each row to the ranks that own its experts, groups rows by local
// expert, and brings the results home as one weighted sum per token.
#pragma once

#include "core/catalog.h"
#include "core/flow.h"
#include "dispatch/finish.h"
#include "placement/epoch.h"

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/error.h"
#include "conclave/layer.h"

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
  // Says where the physical experts lie at first; null: in consecutive ranges.
  std::shared_ptr<const PlacementEpoch> epoch = {};
  Reduce reduce = Reduce::kFull;  // kPartial: no exchange, experts of other ranks add nothing
  EpTransport transport = EpTransport::kVariable;
  EpCombine combine = EpCombine::kUnreduced;
  Communicator* communicator = nullptr;  // needed when ep_size > 1 and kFull
  // Other work is done while these travel.
  bool rows_in_background = false;
  bool results_in_background = false;
};

struct DispatchArgs {
  Routing routing;
  RowBundle rows;
  // Says where experts lie in this call, the same on every rank; null: as planned.
  const PlacementEpoch* epoch = nullptr;
};
struct CombineArgs {
  ExpertOutput output;
  Routing routing;         // as given to dispatch
  FinishArgs finish = {};  // terms added before the one rounding
  TensorView out;          // [T / rows_per_sum, H] f32, f16 or bf16, rows may be strided
};

// State between the calls lives in the workspace, so that a Dispatcher is immutable and concurrent
// calls with distinct workspaces are safe on a single rank. With a communicator one thread makes
// all calls, in the same order on every rank; dispatches of distinct workspaces may be under way at
// once. The four calls of a batch get the same workspace of workspace_bytes().
class Dispatcher {
 public:
  virtual ~Dispatcher() = default;

  virtual int64_t num_local_experts() const = 0;  // places for them, spare ones included
  // Upper bound of occupied slots (and of num_slots) that one dispatch can deliver; for contiguous
  // layouts tokens * min(k, E_local) * ep.
  virtual int64_t max_slots() const = 0;
  virtual size_t workspace_bytes() const = 0;

  // Sends rows off; what the routing and the rows point at must live until await_dispatch. Ids
  // outside [0, E) contribute nothing. Collective when ep_size > 1 and kFull, as all that follow.
  // "ep.variable" waits here for its peers' counts, nothing waits for rows.
  virtual void begin_dispatch(const DispatchArgs& args, std::span<std::byte> workspace,
                              Executor& executor) const = 0;
  // Whether await_dispatch would wait for nobody. Never blocks; throws CommError as it does.
  virtual bool rows_have_come(std::span<std::byte> workspace) const = 0;
  virtual ExpertBatch await_dispatch(std::span<std::byte> workspace) const = 0;
  // Sends the experts' results home. `args.finish` is read by await_combine only: its terms may
  // still be made in between.
  virtual void begin_combine(const CombineArgs& args, std::span<std::byte> workspace,
                             Executor& executor) const = 0;
  // out[t] = round(finish(sum over slots 0..k-1 of weight * row, float32)); a token whose ids are
  // all skipped has the sum 0. With rows_per_sum a token's slots are those of all its rows, in
  // order. `args` as given to begin_combine, but for `finish`.
  virtual void await_combine(const CombineArgs& args, std::span<std::byte> workspace,
                             Executor& executor) const = 0;

  // Both halves.
  ExpertBatch dispatch(const Routing& routing, const RowBundle& rows,
                       std::span<std::byte> workspace, Executor& executor) const;
  void combine(const CombineArgs& args, std::span<std::byte> workspace, Executor& executor) const;
};

struct DispatcherRow {
  std::string_view name;  // "local", "ep.fixed_slots", "ep.variable"
  Support (*supports)(const DispatchProblem& problem);
  std::unique_ptr<Dispatcher> (*make)(const DispatchProblem& problem);
};
Catalog<DispatcherRow> dispatcher_catalog();

}  // namespace conclave::inline v0::dispatch
