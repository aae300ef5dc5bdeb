#include "experts/quantize_rows.h"
#include "layer/pipeline.h"
#include "layer/route_stage.h"
#include "layer/shared_stage.h"

#include <chrono>

namespace conclave::inline v0 {
namespace {

using Clock = std::chrono::steady_clock;

// Adds the time since its construction to one field, where timings are wanted.
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

RowBundle quantize_chunk(const PipelineArgs& args) {
  const experts::BatchRequirements wanted = args.plan.experts->requirements();
  return experts::quantize_rows(
      chunk_rows(args.args.hidden, args.chunk), wanted.row_dtype, wanted.row_bytes,
      slice_as<std::byte>(args.workspace, args.plan.slices.rows), args.executor);
}

std::span<std::byte> sub_workspace(const PipelineArgs& args, const WorkspaceSlice& slice) {
  return args.workspace.subspan(slice.offset, slice.bytes);
}

// Shared rows go to the caller's own tensor where asked for; then combine adds none.
const float* hand_out_shared(const PipelineArgs& args, const float* shared) {
  if (args.args.shared_out.empty() || shared == nullptr) return shared;
  convert({.data = shared,
           .dtype = DType::kF32,
           .shape = {args.chunk.count, args.plan.spec.hidden_size},
           .row_stride = args.plan.shared_row_stride},
          chunk_rows(args.args.shared_out, args.chunk));
  return nullptr;
}

}  // namespace

void StagedPipeline::run(const PipelineArgs& args, ForwardCounters& counters) const {
  const LayerPlan& plan = args.plan;
  StageTimings* timings = args.args.timings;

  RowBundle rows;
  Routing routing;
  {
    const StageTimer timer(timings, &StageTimings::route_ns);
    rows = quantize_chunk(args);
    routing = route_chunk(args, rows, counters);
  }
  ExpertBatch batch;
  {
    const StageTimer timer(timings, &StageTimings::dispatch_ns);
    batch = plan.dispatcher->dispatch(routing, rows, sub_workspace(args, plan.slices.dispatch),
                                      args.executor);
  }
  const ExpertOutput output{.tag = OutputTag::kPerRow,
                            .rows = slice_as<float>(args.workspace, plan.slices.expert_rows),
                            .row_stride = plan.spec.hidden_size};
  {
    const StageTimer timer(timings, &StageTimings::experts_ns);
    plan.experts->run(batch,
                      {.gate_up = args.weights.gate_up.data(), .down = args.weights.down.data()},
                      output, sub_workspace(args, plan.slices.experts), args.executor);
  }
  const float* shared = nullptr;
  {
    const StageTimer timer(timings, &StageTimings::shared_ns);
    shared = hand_out_shared(args, run_shared_expert(args, rows));
  }
  const StageTimer timer(timings, &StageTimings::combine_ns);
  plan.dispatcher->combine({.output = output,
                            .routing = routing,
                            .shared = shared,
                            .shared_stride = plan.shared_row_stride,
                            .out = chunk_rows(args.args.out, args.chunk)},
                           sub_workspace(args, plan.slices.dispatch), args.executor);
}

}  // namespace conclave::inline v0
