// Plan time of a layer on CUDA: its abilities, its ladder over tokens, its scratch memory. Nothing
// here touches the device, so that any machine can test it.
#pragma once

#include "dispatch/cuda/catalog.h"
#include "experts/cuda/adapters/adapter_kernel.h"
#include "experts/ladder.h"
#include "gemm/cuda/catalog.h"
#include "layer/cuda/column_orders.h"
#include "layer/cuda/route_and_group.h"
#include "layer/plan_base.h"
#include "layer/stages/cuda/cuda_stages.h"
#include "routing/cuda/device_router.h"
#include "routing/cuda/fewer_routers.h"

#include "conclave/layer.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// How rows with adapters are computed in calls of up to `last_tokens` tokens.
struct AdapterRung {
  int64_t last_tokens = 0;
  const experts::AdapterKernelRow* row = nullptr;
  experts::DeviceTile tile = {};
  // Rows without an adapter have the bits of the ladder's kernel, so that one pass serves all;
  // otherwise that kernel computes every row, and those that have one are computed again.
  bool in_one_pass = false;
};

// Experts of one kind: routed, shared, or the residual MLP.
struct CudaMlpPlan {
  experts::ExpertsProblem problem;
  std::vector<experts::LadderRung> ladder;
  std::vector<dispatch::GroupRung> grouping = {};
  DType row_dtype = DType::kBF16;  // type of output rows, and of input rows that are not quantised
  int64_t row_stride = 0;          // elements of a row, a multiple of 16 bytes
  std::vector<AdapterRung> adapters = {};  // empty: no row has one

  bool quantises() const;  // its input is codes
  // Every slot reads a row of its own: its expert's order of columns, or times its factors.
  bool has_own_rows() const;
  bool runs_by_reference() const;  // for any number of tokens
};
// Without its ladder.
CudaMlpPlan mlp_plan(const experts::ExpertsProblem& problem);

// Shared experts that run as further experts of the routed ones' launches: each is cut into slices
// as wide as a routed expert, and every slice is a slot of every token.
struct FusedShared {
  int32_t count = 0;   // S
  int32_t slices = 1;  // per shared expert
  int32_t slots() const { return count * slices; }
};
enum class SharedForm : uint8_t { kFused, kSeparate };

// The kernels of the layer's gate products; empty for a product that it lacks.
struct GatePlans {
  std::vector<gemm::GateRung> router;
  std::vector<gemm::GateRung> shared_gate;
  std::vector<gemm::GateRung> mix;
  std::vector<gemm::GateRung> latent_down;
  std::vector<gemm::GateRung> latent_up;
};

// Says what the layer adds to the weighted sum of a token's slots. A call's padding, or a tensor
// for the shared part alone, comes on top.
struct SumEnd {
  bool only_slots = false;     // nothing: one launch may do the whole forward
  bool writes_output = false;  // nothing, and one slot: a down product may write the output itself
  bool rounds_sums = false;    // nothing on this rank: sums that are ready only need rounding
};

struct CudaPlan : PlanBase {
  cuda::DeviceInfo device;
  SharedForm shared_form = SharedForm::kFused;  // the form requested
  CudaMlpPlan routed;                           // includes fused shared experts
  FusedShared fused;                            // slots() is 0 if there are none
  std::optional<CudaMlpPlan> shared;            // S experts that every row uses, launched apart
  std::optional<CudaMlpPlan> residual;          // one expert that every row uses
  SumEnd end;
  GatePlans gates;
  std::vector<RouteGroupRung> routing;  // how calls that the router routes are grouped
  std::shared_ptr<const routing::DeviceRouter> router;  // null if calls must bring ids and weights
  std::shared_ptr<routing::FewerDeviceRouters> fewer_routers;  // beside the router
  bool router_writes_choices = false;                          // beside the slots
  int64_t decode_tokens = 0;  // calls of up to this many tokens take the single launch, if their
                              // arguments allow it; 0: none does
  const experts::OneLaunchRow* decode_row = nullptr;  // serves these calls
  std::string router_limit = {};  // why calls must bring ids and weights; empty: they need not
  // Weights on the input change its codes: rows are weighed first, with one copy per choice.
  bool weighs_rows = false;
  std::optional<LayerOrders> orders;  // as requested
  int32_t scale_span = 0;             // likewise
  CudaStages stages;

  // Routed experts that ids name once replicas are chosen, followed by the shared ones.
  int32_t num_ids() const;
  // The router for calls that ask for so many choices. Throws as FewerDeviceRouters::of.
  const routing::DeviceRouter& router_of(int64_t top_k) const {
    return top_k == spec.top_k ? *router : fewer_routers->of(top_k);
  }
  // Ranks add up their parts of a row, in float32, before it is rounded.
  bool sums_ranks() const { return part.reduces(); }
  // The type in which a rank's sums travel home.
  DType part_dtype() const {
    const bool rounds = options.ep_combine == EpCombine::kRoundedPerRank;
    return rounds ? routed.row_dtype : DType::kF32;
  }
  // The experts of a rank take the tokens of all expert-parallel ranks, in rank order.
  bool gathers_rows() const { return part.gathers(); }
  // For so many tokens of each rank.
  int64_t gathered(int64_t tokens) const {
    return gathers_rows() ? tokens * parallel.ep_size : tokens;
  }
  int32_t num_slots() const { return static_cast<int32_t>(routed.problem.top_k); }
  // Rows that routed experts read per token.
  bool takes_adapters() const { return options.max_adapter_rank > 0; }
  int64_t rows_per_token() const { return has_rows_of_slots() ? spec.top_k : 1; }
  bool has_rows_of_slots() const { return weighs_rows || routed.has_own_rows(); }
};

struct CudaPlanRequest {
  const MoeSpec& spec;
  const LayerOptions& options;
  const ParallelSpec& parallel;
  const cuda::DeviceInfo& device;
  SharedForm shared = SharedForm::kFused;  // kFused: if they can be
  // The orders of columns that the weights have, where a spec has such; none: assumed ones.
  std::optional<LayerOrders> orders = {};
  // The most powers of two that scales of a matrix lie apart; 0: they are near each other, or a
  // plan without weights assumes so.
  int32_t scale_span = 0;
  // The context has it, or none: null. It adds up what tensor-parallel ranks have computed.
  Communicator* tensor_communicator = nullptr;
  // Likewise: it brings rows to the experts of other ranks.
  Communicator* communicator = nullptr;
};

// Throws as plan_layer; Error(kUnsupported) lists every part of the layer that CUDA lacks.
CudaPlan plan_cuda_layer(const CudaPlanRequest& request);
// Every kernel and tile that could serve calls of `tokens` tokens.
std::vector<TuningEntry> list_candidates(const CudaPlan& plan, int64_t tokens);
// The plan as far as it comes, with the reasons in its rows.
Plan summarise_cuda_plan(const CudaPlanRequest& request);

}  // namespace conclave::inline v0
