// Plan time: every choice a layer makes, and the objects that carry it out.
#pragma once

#include "cpu/isa.h"
#include "dispatch/dispatcher.h"
#include "experts/kernel.h"
#include "layer/agreed_values.h"
#include "layer/lent_experts.h"
#include "layer/plan_base.h"
#include "layer/stages/host_stages.h"
#include "routing/limits.h"

#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/routing.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace conclave::inline v0 {

// The work of a layer beyond the plain weighted sum of its routed experts.
struct StageFacts {
  bool reads_hidden_rows = true;           // some kernel reads hidden itself, in its row format
  bool reads_hidden_floats = false;        // a gate or a projection reads it in float32
  bool has_expert_input = false;           // routed experts read other rows: projected or weighted
  int64_t rows_per_token = 1;              // rows dispatch takes: k if every choice has its own
  bool finishes_apart = false;             // combine writes routed_sum; one more pass makes out
  bool weighs_shared_rows = false;         // shared_weights apply
  bool mixes = false;                      // the routed part has a factor too
  bool computes_factors = false;           // a stage makes factors of the parts of a sum
  bool marks_hidden_rows = false;          // rows of hidden say which adapter they have
  bool factors_read_hidden = false;        // that stage reads hidden, in float32
  experts::BatchRequirements hidden_rows;  // what kernels of width H read
  int64_t routed_sum_stride = 0;

  // The buffers of what several stages read.
  HostBuffer floats = HostBuffer::kHiddenFloats;
  HostBuffer expert_input = HostBuffer::kHiddenRows;
  HostBuffer ids = HostBuffer::kTopkIds;  // as dispatch and combine take the routing
  HostBuffer weights = HostBuffer::kTopkWeights;

  // Kernels read float32: their rows serve gates and projections too.
  bool hidden_rows_are_float() const {
    return reads_hidden_rows && hidden_rows.row_dtype == DType::kF32;
  }
};

// Says which wait a rank's shared experts and residual MLP fill: for the rows of others, unless
// these have come already, or for its results. By turns: one chunk the former, the next one the
// latter.
enum class FillsWait : uint8_t { kForRows, kForResults, kByTurns };

struct LayerPlan : PlanBase {
  cpu::Isa isa = cpu::Isa::kScalar;
  cpu::Arithmetic arithmetic = cpu::Arithmetic::kF32Fma;

  std::unique_ptr<Router> router;
  std::unique_ptr<routing::FewerChoices> fewer_choices;  // for calls with a top_k of their own
  std::unique_ptr<dispatch::Dispatcher> dispatcher;
  std::unique_ptr<experts::ExpertsKernel> experts;
  std::unique_ptr<experts::ExpertsKernel> shared;    // S experts; null without shared experts here
  std::unique_ptr<experts::ExpertsKernel> residual;  // one expert; null without a residual MLP here

  InPlaceParts in_place;

  StageFacts facts;
  HostStages stages;
  int32_t workers = 1;  // the executor has them
  size_t router_scratch_bytes = 0;
  HostSlices slices;
  ChunkOrder chunk_order = ChunkOrder::kInTurn;
  FillsWait fills_wait = FillsWait::kForResults;
  bool rows_in_background = false;  // something is computed while rows travel
  bool results_in_background = false;
  size_t chunk_workspace_bytes = 0;  // what the slices take
  size_t workspace_bytes = 0;        // for all chunks under way at once
  int64_t gate_row_bytes = 0;        // bytes per float32 row, zero padded

  // The most tokens of a chunk.
  int64_t chunk_tokens() const { return chunk_rule ? chunk_rule->most_tokens : options.max_tokens; }
};

// Ranks on CPUs must have these in common beside spec, options and split.
std::vector<AgreedValue> own_agreed_values(const LayerPlan& plan);

// Says where a layer's weights lie: a source to be asked, or what is known. Neither, for a plan
// without weights.
struct WeightPlaces {
  const WeightSource* source = nullptr;
  const InPlaceParts* known = nullptr;
};

// Throws Error(kUnsupported) listing every row's reason if no row of a table fits, and the errors
// of validate().
LayerPlan plan_layer(const Context& context, const MoeSpec& spec, const LayerOptions& options,
                     const ParallelSpec& parallel, const WeightPlaces& places = {});
// The plan in words; if no row of a table fits, the plan up to that table.
Plan summarise_plan(const Context& context, const MoeSpec& spec, const LayerOptions& options,
                    const ParallelSpec& parallel, const WeightPlaces& places = {});

}  // namespace conclave::inline v0
