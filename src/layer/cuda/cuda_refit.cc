#include "layer/cuda/cuda_refit.h"

#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/device_wait.h"
#include "cuda/drained.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/code_factors.h"
#include "layer/cuda/mlp_weights.h"
#include "layer/cuda/weight_planes.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"

#include <algorithm>
#include <cuda_runtime_api.h>
#include <utility>

namespace conclave::inline v0 {
namespace {

WeightId unit_of(const LocalExpert& expert, MlpHalf half) {
  return expert.id(half == MlpHalf::kDown ? WeightMatrix::kDown : WeightMatrix::kUp);
}

bool has(const RefitUnits& units, const LocalExpert& expert, MlpHalf half) {
  return units.has(unit_of(expert, half), expert.expert);
}

// Experts of `mlp` whose half is among the units.
MlpSource named_of(const MlpSource& mlp, MlpHalf half, const RefitUnits& units) {
  MlpSource named{.problem = mlp.problem,
                  .experts = {},
                  .adds_down_bias = mlp.adds_down_bias,
                  .forms = mlp.forms,
                  .only = half};
  for (const LocalExpert& expert : mlp.experts) {
    if (has(units, expert, half)) named.experts.push_back(expert);
  }
  return named;
}

bool covers_all(const MlpSource& mlp, const RefitUnits& units) {
  return std::ranges::all_of(mlp.experts, [&](const LocalExpert& expert) {
    return has(units, expert, MlpHalf::kGateUp) && has(units, expert, MlpHalf::kDown);
  });
}

// The order of down's columns is that of gate's and up's rows.
void check_whole_experts(const MlpSource& mlp, const RefitUnits& units) {
  if (mlp.problem.ordered.gate_up == 0) return;
  for (const LocalExpert& expert : mlp.experts) {
    if (has(units, expert, MlpHalf::kGateUp) == has(units, expert, MlpHalf::kDown)) continue;
    throw Error(ErrorCode::kUnsupported,
                {.what = "experts whose columns have an order change gate, up and down together "
                         "on a GPU",
                 .tensor = "RefitScope",
                 .hint = "name all of them"});
  }
}

[[noreturn]] void refuse_lent(const char* hint) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "experts that are read where the caller keeps them are not copied over",
               .tensor = "RefitScope",
               .hint = hint});
}

// Whether rows of codes end within a block of lanes.
bool has_padded_lanes(const MlpSource& mlp, const CudaMlpWeights& weights, MlpHalf half) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (experts::code_order(problem) == experts::CodeOrder::kStored) return false;
  const bool is_down = half == MlpHalf::kDown;
  const int64_t columns = is_down ? problem.intermediate_size : problem.input_columns();
  const int64_t stride = (is_down ? weights.view.down : weights.view.gate_up).stride;
  return columns % experts::kLaneColumns != 0 ||
         experts::stored_columns(problem, columns) != stride;
}

constexpr const char* kHowToChangeLent =
    "write new weights there between two forwards, or reload with ReloadMode::kStaged";

// Everything that the device has been given counts, also graphs, which no layer sees.
void await_device() {
  if (cuda::wait_for_device()) return;
  throw Error(ErrorCode::kState,
              {.what = "a refit waits for the work of its device, of which a stream is being "
                       "captured",
               .hint = "let captures end before it commits, or overwrites weights in place"});
}

}  // namespace

CudaRefit::CudaRefit(const RefittedWeights& layer, const RefitRequest& request)
    : context_(layer.context),
      allocator_(layer.allocator),
      plan_(layer.plan),
      live_(layer.live),
      spare_(layer.spare),
      fence_(layer.fence),
      mode_(request.mode),
      keeps_memory_(request.keeps_memory) {
  const BesideCaptures beside;
  stream_ = cuda::make_stream();
  if (keeps_memory_) {
    rings_ = std::move(spare_.rings);
  } else {
    spare_ = {};
  }
  add_mlp(routed_source(plan_, request.places), &CudaWeights::routed, request.scope);
  if (plan_.shared) add_mlp(shared_source(plan_), &CudaWeights::shared, request.scope);
  if (plan_.residual) add_mlp(residual_source(plan_), &CudaWeights::residual, request.scope);
  own_ = allocate_own_weights(
      allocator_, plan_, [&](WeightId id) { return request.scope.has(id, 0); }, to_stream(queue()),
      live_);
  cuda::check(cudaStreamSynchronize(queue()), "cudaStreamSynchronize");
  const ForwardGate::Closed closed(request.gate);
  fence_.watch();
}

// Memory goes here, not with the members: beside captures.
CudaRefit::~CudaRefit() {
  const BesideCaptures beside;
  fence_.unwatch();
  static_cast<void>(cudaStreamSynchronize(queue()));
  if (keeps_memory_) leave_memory();
  halves_.clear();
  own_ = {};
  rings_.clear();
}

void CudaRefit::leave_memory() {
  spare_.rings = std::move(rings_);
  if (mode_ == RefitMode::kInPlace) return;
  for (Half& half : halves_) {
    spare_.halves.push_back({.held = half.held,
                             .half = half.half,
                             .places = std::move(half.places),
                             .staged = std::move(half.staged)});
  }
}

void CudaRefit::add_mlp(const MlpSource& all, CudaMlpWeights CudaWeights::*held,
                        const RefitUnits& scope) {
  check_whole_experts(all, scope);
  for (const MlpHalf half : {MlpHalf::kGateUp, MlpHalf::kDown}) {
    Half added{.held = held, .half = half, .all = all, .touched = named_of(all, half, scope)};
    if (added.touched.experts.empty()) continue;
    if ((live_.*held).in_place) {
      if (mode_ != RefitMode::kInPlace) refuse_lent(kHowToChangeLent);
      if (!covers_all(all, scope)) refuse_lent("name all of them");
    }
    for (const LocalExpert& expert : added.touched.experts) added.places.push_back(expert.place);
    if (mode_ != RefitMode::kInPlace) make_room(added);
    halves_.push_back(std::move(added));
  }
}

void CudaRefit::make_room(Half& half) {
  for (size_t i = 0; i < half.touched.experts.size(); ++i) {
    half.touched.experts[i].place = static_cast<int64_t>(i);
  }
  if (take_spare(half)) return;
  const DeviceArrays arrays(allocator_, to_stream(queue()));
  half.staged = allocate_mlp(arrays, half.touched, nullptr);
}

bool CudaRefit::take_spare(Half& half) {
  const auto fits = [&](const StagedHalf& spare) {
    return spare.held == half.held && spare.half == half.half && spare.places == half.places;
  };
  const auto found = std::ranges::find_if(spare_.halves, fits);
  if (found == spare_.halves.end()) return false;
  half.staged = std::move(found->staged);
  half.staged.of(half.half).form.reset();
  spare_.halves.erase(found);
  return true;
}

CudaMlpWeights& CudaRefit::target_of(Half& half) {
  return mode_ == RefitMode::kInPlace ? live_.*half.held : half.staged;
}

MlpSource CudaRefit::part_of(const Half& half, const RefitUnits& units) const {
  MlpSource part = named_of(half.touched, half.half, units);
  // All experts at once take the form that suits them, as when a layer is made.
  if (part.experts.size() < half.all.experts.size()) {
    const std::optional<experts::ByteForm> staged = half.staged.of(half.half).form;
    part.byte_form = staged ? staged : (live_.*half.held).of(half.half).form;
  }
  return part;
}

// Before anything is overwritten.
void CudaRefit::check_parts(const StageCall& call) const {
  for (const Half& half : halves_) {
    if (part_of(half, call.units).experts.empty()) continue;
    check_whole_experts(half.all, call.units);
    if (!(live_.*half.held).in_place) continue;
    if (!covers_all(half.all, call.units)) refuse_lent("stage all of them in one call");
    check_lent(half.all, call.source, live_.*half.held);
  }
}

void CudaRefit::fill(Half& half, const MlpSource& part, const WeightSource& source,
                     UploadLanes& lanes) {
  CudaMlpWeights& target = target_of(half);
  // Codes that were put into the order of lanes fill bytes in which stored rows have none.
  if (has_padded_lanes(half.all, target, half.half)) {
    const ExpertPlane matrix = matrix_plane(half.all, target, half.half);
    for (const LocalExpert& expert : part.experts) {
      cuda::check(cudaMemsetAsync(matrix.at(expert.place), 0, matrix.bytes, queue()),
                  "cudaMemsetAsync");
    }
  }
  fill_mlp(part, source, lanes, target, context_);
}

// An optional weight that does not come again is gone.
void CudaRefit::stage_own(const StageCall& call, WeightUpload& upload) {
  const auto wants = [&](WeightId id) { return call.units.has(id, 0); };
  for (const WeightId id : weights::kAll) {
    const DeviceMemory& memory = own_.own[id].memory;
    if (memory.empty() || !wants(id)) continue;
    cuda::check(cudaMemsetAsync(memory.as(), 0, memory.bytes(), queue()), "cudaMemsetAsync");
  }
  fill_own_weights(context_, plan_, call.source, wants, upload, own_);
}

// Small weights come first, as their values are checked: nothing has been overwritten then.
void CudaRefit::stage(const StageCall& call) {
  const cuda::DeviceGuard guard(plan_.device.ordinal);
  const BesideCaptures beside;
  check_parts(call);
  const cuda::Drained drained(queue());
  UploadLanes lanes(call.source, queue(), plan_.device.ordinal,
                    call.executor != nullptr ? *call.executor : context_.executor(), rings_);
  stage_own(call, lanes.own());
  bool has_told = mode_ != RefitMode::kInPlace;
  for (Half& half : halves_) {
    const MlpSource part = part_of(half, call.units);
    if (part.experts.empty()) continue;
    if (!std::exchange(has_told, true)) {
      await_device();  // where it throws, the old weights stay
      call.before_overwriting();
      await_device();
    }
    fill(half, part, call.source, lanes);
  }
  lanes.finish();
}

// Forwards that began before the fence watched are over then, and so are replays of graphs.
void CudaRefit::prepare() {
  const cuda::DeviceGuard guard(plan_.device.ordinal);
  const BesideCaptures beside;
  await_device();
}

void CudaRefit::copy(const void* from, void* to, size_t bytes) {
  if (bytes == 0) return;
  cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, queue()),
              "cudaMemcpyAsync");
}

void CudaRefit::copy_half(const Half& half) {
  CudaMlpWeights& held = live_.*half.held;
  CudaMatrixMemory& memory = held.of(half.half);
  const CudaMatrixMemory& staged = half.staged.of(half.half);
  const std::vector<ExpertPlane> from = planes_of(half.touched, half.staged, half.half);
  const std::vector<ExpertPlane> to = planes_of(half.all, held, half.half);
  const size_t count = half.places.size();
  for (size_t begin = 0, end = 0; begin < count; begin = end) {
    for (end = begin + 1; end < count && half.places[end] == half.places[end - 1] + 1;) ++end;
    for (size_t plane = 0; plane < from.size(); ++plane) {
      copy(from[plane].at(static_cast<int64_t>(begin)), to[plane].at(half.places[begin]),
           (end - begin) * from[plane].bytes);
    }
  }
  const size_t step = half.half == MlpHalf::kGateUp ? 0 : 1;
  if (!held.static_scales.empty()) {
    copy(half.staged.static_scales.as<float>() + step, held.static_scales.as<float>() + step,
         sizeof(float));
  }
  copy(staged.byte_form.as(), memory.byte_form.as(), memory.byte_form.bytes());
  memory.form = staged.form;
  if (memory.short_scales.empty()) return;
  for (size_t i = 0; i < count; ++i) {
    memory.has_short_scales[static_cast<size_t>(half.places[i])] = staged.has_short_scales[i];
  }
  // One byte of an integer of value 1 or 0.
  cuda::check(
      cudaMemsetAsync(memory.short_scales.as(), has_only_short_scales(memory) ? 1 : 0, 1, queue()),
      "cudaMemsetAsync");
}

void CudaRefit::publish() {
  const cuda::DeviceGuard guard(plan_.device.ordinal);
  const BesideCaptures beside;
  fence_.follow_readers(queue());
  if (mode_ != RefitMode::kInPlace) {
    for (const Half& half : halves_) copy_half(half);
  }
  for (const WeightId id : weights::kAll) {
    const DeviceMemory& from = own_.own[id].memory;
    copy(from.as(), live_.own[id].memory.as(), from.bytes());
  }
  if (!own_.own[weights::kRouter].memory.empty()) {
    live_.gate_rows_with_nan = own_.gate_rows_with_nan;
  }
  for (size_t i = 0; i < own_.router_tensors.size(); ++i) {
    const DeviceMemory& from = own_.router_tensors[i];
    copy(from.as(), live_.router_tensors[i].as(), from.bytes());
  }
  fence_.publish(queue());
}

void CudaRefit::settle() {
  const BesideCaptures beside;
  cuda::check(cudaStreamSynchronize(queue()), "cudaStreamSynchronize");
  fence_.settled();
}

}  // namespace conclave::inline v0
