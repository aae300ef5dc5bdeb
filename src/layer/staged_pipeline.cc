#include "layer/dense_mlp.h"
#include "layer/finish_stage.h"
#include "layer/input_stage.h"
#include "layer/pipeline.h"
#include "layer/rank_stage.h"
#include "layer/route_stage.h"
#include "layer/shared_stage.h"

#include <chrono>
#include <cstring>

namespace conclave::inline v0 {
namespace {

using Clock = std::chrono::steady_clock;

// Adds the time since its construction to one field, if timings are wanted.
class StageTimer {
 public:
  StageTimer(StageTimings* timings, int64_t StageTimings::*field)
      : timings_(timings),
        field_(field),
        begin_(timings != nullptr ? Clock::now() : Clock::time_point()) {}
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;
  ~StageTimer() {
    if (timings_ == nullptr) return;
    timings_->*field_ +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin_).count();
  }

 private:
  StageTimings* timings_;
  int64_t StageTimings::*field_;
  Clock::time_point begin_;
};

std::span<std::byte> sub_workspace(const PipelineArgs& args, const WorkspaceSlice& slice) {
  return args.workspace.subspan(slice.offset, slice.bytes);
}

// Zero bytes are zero in every activation type.
void fill_zero(const TensorView& rows) {
  const int64_t stride = rows.row_stride != 0 ? rows.row_stride : rows.shape[1];
  const int64_t element = byte_size(rows.dtype);
  for (int64_t row = 0; row < rows.shape[0]; ++row) {
    std::memset(static_cast<std::byte*>(rows.data) + row * stride * element, 0,
                static_cast<size_t>(rows.shape[1] * element));
  }
}

// Writes shared rows to the caller's own tensor if there is one; the sum then takes none. The rows
// are zeros if they count on another rank.
const float* hand_out_shared(const PipelineArgs& args, const float* shared) {
  if (args.args.shared_out.empty()) return shared;
  const TensorView destination = chunk_rows(args.args.shared_out, args.chunk);
  if (shared == nullptr) {
    fill_zero(destination);
    return nullptr;
  }
  convert({.data = shared,
           .dtype = DType::kF32,
           .shape = {args.chunk.count, args.plan.spec.hidden_size}},
          destination);
  return nullptr;
}

// [count, H] float32, or null without shared experts.
const float* run_shared(const PipelineArgs& args, const RowBundle& hidden_rows) {
  return sum_over_tensor_ranks(args, run_shared_experts(args, hidden_rows),
                               args.plan.spec.hidden_size, args.plan.slices.reduced_shared);
}

// [count, H] float32, or null without a residual MLP.
const float* run_residual(const PipelineArgs& args, const RowBundle& hidden_rows) {
  if (args.plan.residual == nullptr) return nullptr;
  auto* rows = slice_as<float>(args.workspace, args.plan.slices.residual_rows);
  run_on_every_row(args,
                   {.kernel = *args.plan.residual,
                    .weights = {.gate_up = args.weights.residual_gate_up.data(),
                                .down = args.weights.residual_down.data()}},
                   residual_rows(args, hidden_rows), rows);
  return sum_over_tensor_ranks(args, rows, args.plan.spec.hidden_size,
                               args.plan.slices.reduced_residual);
}

}  // namespace

void StagedPipeline::run(const PipelineArgs& args, ForwardCounters& counters) const {
  const LayerPlan& plan = args.plan;
  StageTimings* timings = args.args.timings;

  RowBundle hidden_rows;
  FinishInputs parts;
  {
    const StageTimer timer(timings, &StageTimings::route_ns);
    hidden_rows = quantize_hidden(args);
    parts.routing = route_chunk(args, hidden_rows, counters);
  }
  ExpertInput input;
  ExpertBatch batch;
  {
    const StageTimer timer(timings, &StageTimings::dispatch_ns);
    input = make_expert_input(args, hidden_rows, parts.routing);
    parts.dispatched = route_to_replicas(args, input.routing);
    batch = plan.dispatcher->dispatch(parts.dispatched, input.rows,
                                      sub_workspace(args, plan.slices.dispatch), args.executor);
  }
  parts.output = {.tag = OutputTag::kPerRow,
                  .rows = slice_as<float>(args.workspace, plan.slices.expert_rows),
                  .row_stride = expert_width(plan.spec)};
  {
    const StageTimer timer(timings, &StageTimings::experts_ns);
    plan.experts->run(batch,
                      {.gate_up = args.weights.gate_up.data(),
                       .down = args.weights.down.data(),
                       .input_scale = args.weights.static_scales.input,
                       .intermediate_scale = args.weights.static_scales.intermediate},
                      parts.output, sub_workspace(args, plan.slices.experts), args.executor);
  }
  {
    const StageTimer timer(timings, &StageTimings::shared_ns);
    parts.shared = hand_out_shared(args, run_shared(args, hidden_rows));
    parts.residual = run_residual(args, hidden_rows);
  }
  const StageTimer timer(timings, &StageTimings::combine_ns);
  combine_and_finish(args, parts);
}

}  // namespace conclave::inline v0
