#include "layer/stages/chunk.h"

#include "layer/stages/dense_mlp.h"
#include "layer/stages/finish.h"
#include "layer/stages/input.h"
#include "layer/stages/ranks.h"
#include "layer/stages/route.h"
#include "layer/stages/shared.h"

#include <algorithm>
#include <array>
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

// What a step of a chunk leaves for the next one; everything else is in the chunk's workspace.
struct ChunkState {
  RowBundle hidden_rows;
  FinishInputs parts;
};

// Routes the chunk and sends its rows off.
void begin_chunk(const PipelineArgs& args, ChunkState& state, ForwardCounters& counters) {
  StageTimings* const timings = args.args.timings;
  FinishInputs& parts = state.parts;
  {
    const StageTimer timer(timings, &StageTimings::route_ns);
    state.hidden_rows = quantize_hidden(args);
    parts.routing = route_chunk(args, state.hidden_rows, counters);
  }
  const StageTimer timer(timings, &StageTimings::dispatch_ns);
  const ExpertInput input = make_expert_input(args, state.hidden_rows, parts.routing);
  parts.dispatched = route_to_replicas(args, input.routing);
  args.plan.dispatcher->begin_dispatch(
      {.routing = parts.dispatched, .rows = input.rows, .epoch = &args.epoch},
      sub_workspace(args, args.plan.slices.dispatch), args.executor);
}

// Runs the experts on the rows that came, sends the results home, and while these travel runs what
// every rank computes for its own tokens.
void run_chunk(const PipelineArgs& args, ChunkState& state) {
  const LayerPlan& plan = args.plan;
  StageTimings* const timings = args.args.timings;
  FinishInputs& parts = state.parts;
  ExpertBatch batch;
  {
    const StageTimer timer(timings, &StageTimings::dispatch_ns);
    batch = plan.dispatcher->await_dispatch(sub_workspace(args, plan.slices.dispatch));
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
    const StageTimer timer(timings, &StageTimings::combine_ns);
    begin_combine(args, parts);
  }
  const StageTimer timer(timings, &StageTimings::shared_ns);
  parts.shared = hand_out_shared(args, run_shared(args, state.hidden_rows));
  parts.residual = run_residual(args, state.hidden_rows);
}

void finish_chunk(const PipelineArgs& args, const ChunkState& state) {
  const StageTimer timer(args.args.timings, &StageTimings::combine_ns);
  combine_and_finish(args, state.parts);
}

void run_in_turn(const PipelineCall& call, ForwardCounters& counters) {
  for (int64_t index = 0; index < call.chunks; ++index) {
    const PipelineArgs args = call.chunk(index);
    ChunkState state;
    begin_chunk(args, state, counters);
    run_chunk(args, state);
    finish_chunk(args, state);
  }
}

// While the experts of a chunk run, the rows of the next one come; while those of that one run, the
// results of the first go home. Each of the two has a half of the workspace, which the chunk after
// the next takes over.
void run_by_twos(const PipelineCall& call, ForwardCounters& counters) {
  std::array<ChunkState, 2> states;
  const auto state_of = [&](int64_t index) -> ChunkState& {
    return states[static_cast<size_t>(index % 2)];
  };
  const auto begin = [&](int64_t index) {
    if (index < call.chunks) begin_chunk(call.chunk(index), state_of(index), counters);
  };
  begin(0);
  begin(1);
  for (int64_t first = 0; first < call.chunks; first += 2) {
    const int64_t end = std::min(first + 2, call.chunks);
    for (int64_t index = first; index < end; ++index) run_chunk(call.chunk(index), state_of(index));
    for (int64_t index = first; index < end; ++index) {
      finish_chunk(call.chunk(index), state_of(index));
      begin(index + 2);
    }
  }
}

}  // namespace

PipelineArgs PipelineCall::chunk(int64_t index) const {
  const bool by_twos = plan.chunk_order == ChunkOrder::kByTwos;
  const size_t half = by_twos ? static_cast<size_t>(index % 2) : 0;
  return {
      .plan = plan,
      .weights = weights,
      .args = args,
      .epoch = epoch,
      .chunk = chunk_at(tokens, chunks, index),
      .workspace = workspace.subspan(half * plan.chunk_workspace_bytes, plan.chunk_workspace_bytes),
      .executor = executor};
}

void run_chunks(const PipelineCall& call, ForwardCounters& counters) {
  if (call.plan.chunk_order == ChunkOrder::kByTwos) return run_by_twos(call, counters);
  run_in_turn(call, counters);
}

}  // namespace conclave::inline v0
