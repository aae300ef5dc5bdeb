#include "layer/cuda/expert_mover.h"

#include "core/checked.h"
#include "core/word_hash.h"
#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/device_wait.h"
#include "cuda/drained.h"
#include "experts/cuda/factor_planes.h"
#include "layer/cuda/code_factors.h"
#include "layer/cuda/mlp_weights.h"
#include "layer/cuda/plane_hash.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr const char* kCopyPhase = "migration: copy experts";
constexpr std::array kHalves = {MlpHalf::kGateUp, MlpHalf::kDown};
// Planes begin at multiples of this in a temporary place.
constexpr size_t kPlaneAlignment = 256;

size_t padded(size_t bytes) {
  return (bytes + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
}

bool carries_device_memory(const Communicator& communicator) {
  return static_cast<bool>(communicator.supports(CommFeature::kDeviceMemory));
}

// A wait for a device looks at it all the time at first, which would use up the share of a core of
// a copy in the background.
void await(const MoveCall& call, CommHandle handle) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kBetweenLooks = std::chrono::microseconds(100);
  Communicator& communicator = *call.communicator;
  const std::chrono::nanoseconds deadline = communicator.timeout();
  const Clock::time_point begin = Clock::now();
  while (call.pace.rests() && Clock::now() - begin < deadline / 2 &&
         !communicator.test(handle, kCopyPhase)) {
    std::this_thread::sleep_for(kBetweenLooks);
  }
  const std::chrono::nanoseconds left = deadline - (Clock::now() - begin);
  communicator.wait(handle, std::max(left, std::chrono::nanoseconds(0)), kCopyPhase);
}

// Kernels that wait for a peer that rests would take multiprocessors from forwards meanwhile, so
// that the host waits first.
void meet(const MoveCall& call, int32_t peer) {
  if (!call.pace.rests()) return;
  static constexpr std::byte kReady{1};
  std::byte theirs{};
  Communicator& communicator = *call.communicator;
  const CommHandle sent = communicator.begin_send(peer, std::span(&kReady, 1));
  communicator.recv(peer, std::span(&theirs, 1), kCopyPhase);
  communicator.wait(sent, communicator.timeout(), kCopyPhase);
}

}  // namespace

int64_t key_of_planes(const CudaPlan& plan, const CudaWeights& weights) {
  const MlpSource mlp = routed_source(plan);
  const experts::OrderedColumns& ordered = mlp.problem.ordered;
  WordHash key;
  for (const MlpHalf half : kHalves) {
    for (const ExpertPlane& plane : planes_of(mlp, weights.routed, half)) key.add(plane.bytes);
    const std::optional<experts::ByteForm>& form = weights.routed.of(half).form;
    key.add(form ? 1 + static_cast<uint64_t>(*form) : 0);
  }
  key.add(static_cast<uint64_t>(mlp.problem.weight_dtype));
  key.add(static_cast<uint64_t>(experts::code_order(mlp.problem)));
  // A kernel may take no scales but near ones.
  key.add(mlp.forms.near_scales ? 1 : 0);
  for (const int64_t part : {ordered.gate_up_group, ordered.down_group, ordered.gate_up,
                             ordered.up_begin, plan.part.inner.begin, plan.part.inner.end}) {
    key.add(static_cast<uint64_t>(part));
  }
  return key.key();
}

CudaExpertMover::CudaExpertMover(const MovedWeights& layer) : layer_(layer) {}

// Memory goes here, not with the members: on its device, and beside captures.
CudaExpertMover::~CudaExpertMover() {
  const BesideCaptures beside;
  close();
  staged_ = {};
  sum_ = {};
  ring_ = {};
  rings_.clear();
}

MlpSource CudaExpertMover::all() const { return routed_source(layer_.plan); }

void CudaExpertMover::await_device() {
  const cuda::DeviceGuard guard(layer_.plan.device.ordinal);
  if (cuda::wait_for_device()) return;
  throw Error(ErrorCode::kState,
              {.what = "experts that begin to move wait for the work of their device, of which a "
                       "stream is being captured",
               .hint = "let captures end before"});
}

void CudaExpertMover::open() {
  const cuda::DeviceGuard guard(layer_.plan.device.ordinal);
  const BesideCaptures beside;
  if (stream_ == nullptr) {
    stream_ = cuda::make_stream();
    sum_ =
        DeviceMemory(layer_.allocator, sizeof(uint64_t), to_stream(queue()), "hash of an expert");
  }
  layer_.memory.next.make_room(layer_.live, layer_.allocator, queue());
  {
    const ForwardGate::Closed closed(layer_.gate);
    layer_.fence.watch();
  }
  is_open_ = true;
  try {
    await_device();
  } catch (...) {
    close();
    throw;
  }
}

void CudaExpertMover::close() noexcept {
  if (!std::exchange(is_open_, false)) return;
  try {
    const cuda::DeviceGuard guard(layer_.plan.device.ordinal);
    const BesideCaptures beside;
    await_switch();
  } catch (const std::exception&) {
    // The device has failed, and the next forward says so.
    layer_.fence.unwatch();
    return;
  }
  layer_.fence.unwatch();
}

// Forwards on other streams follow a switch only as long as the host does not know it has passed.
void CudaExpertMover::await_switch() {
  layer_.fence.await_copies();
  layer_.fence.settled();
}

void CudaExpertMover::make_temporary(bool wanted) {
  const cuda::DeviceGuard guard(layer_.plan.device.ordinal);
  const BesideCaptures beside;
  if (!wanted) {
    layer_.memory.temporary = {};
    return;
  }
  if (!layer_.memory.temporary.empty()) return;
  size_t bytes = 0;
  for (const std::span<std::byte> plane : slot_at(0)) {
    bytes += padded(plane.size());
  }
  layer_.memory.temporary =
      DeviceMemory(layer_.allocator, bytes, to_stream(queue()), "temporary place");
}

CudaExpertMover::Slot CudaExpertMover::slot_at(int32_t place) const {
  const MlpSource mlp = all();
  std::byte* temporary = is_temporary(place) ? layer_.memory.temporary.as() : nullptr;
  Slot slot;
  for (const MlpHalf half : kHalves) {
    for (const ExpertPlane& plane : planes_of(mlp, layer_.live.routed, half)) {
      if (temporary == nullptr) {
        slot.emplace_back(plane.at(place), plane.bytes);
        continue;
      }
      slot.emplace_back(temporary, plane.bytes);
      temporary += padded(plane.bytes);
    }
  }
  return slot;
}

ExpertTraits CudaExpertMover::traits_of(int32_t place) const {
  if (is_temporary(place)) return layer_.memory.temporary_traits;
  const auto is_short = [&](const CudaMatrixMemory& memory) -> uint64_t {
    if (memory.has_short_scales.empty()) return 1;
    return memory.has_short_scales[static_cast<size_t>(place)];
  };
  return {is_short(layer_.live.routed.gate_up), is_short(layer_.live.routed.down)};
}

// Kernels are right either way where all scales are short, so that one may read this at any time.
void CudaExpertMover::set_traits(int32_t place, const ExpertTraits& traits) {
  if (is_temporary(place)) {
    layer_.memory.temporary_traits = traits;
    return;
  }
  const auto set = [&](CudaMatrixMemory& memory, uint64_t is_short) {
    if (memory.short_scales.empty()) return;
    memory.has_short_scales[static_cast<size_t>(place)] = is_short != 0 ? 1 : 0;
    // One byte of an integer of value 1 or 0.
    cuda::check(cudaMemsetAsync(memory.short_scales.as(), has_only_short_scales(memory) ? 1 : 0, 1,
                                queue()),
                "cudaMemsetAsync");
  };
  set(layer_.live.routed.gate_up, traits.gate_up_is_short);
  set(layer_.live.routed.down, traits.down_is_short);
}

void CudaExpertMover::between_pieces(const MoveCall& call) const {
  if (call.stopped.load(std::memory_order_acquire)) {
    throw CommError(ErrorCode::kCommAborted, -1, kCopyPhase, "the migration was ended");
  }
  call.pace.rest();
}

// Calls visit(plane, offset, bytes) for each piece of an expert.
template <class Visit>
void CudaExpertMover::for_each_piece(const MoveCall& call, int32_t place,
                                     const Visit& visit) const {
  const Slot slot = slot_at(place);
  for (size_t plane = 0; plane < slot.size(); ++plane) {
    for (size_t at = 0; at < slot[plane].size(); at += call.piece_bytes) {
      visit(plane, at, std::min(call.piece_bytes, slot[plane].size() - at));
      between_pieces(call);
    }
  }
}

// Steps that experts have in common must be those of the rank that an expert comes from.
uint64_t CudaExpertMover::hash(int32_t place) {
  cuda::check(cudaMemsetAsync(sum_.as(), 0, sizeof(uint64_t), queue()), "cudaMemsetAsync");
  uint64_t plane_number = 0;
  const auto add = [&](const std::byte* data, size_t bytes) {
    add_plane_hash(data, bytes, plane_number++ << 48U, sum_.as<uint64_t>(), queue());
  };
  for (const std::span<std::byte> plane : slot_at(place)) add(plane.data(), plane.size());
  add(layer_.live.routed.static_scales.as(), layer_.live.routed.static_scales.bytes());
  uint64_t sum = 0;
  cuda::check(cudaMemcpyAsync(&sum, sum_.as(), sizeof(sum), cudaMemcpyDeviceToHost, queue()),
              "cudaMemcpyAsync");
  cuda::check(cudaStreamSynchronize(queue()), "cudaStreamSynchronize");
  const ExpertTraits traits = traits_of(place);
  return sum + 2 * traits.gate_up_is_short + traits.down_is_short;
}

std::span<std::byte> CudaExpertMover::pinned(size_t bytes) {
  return {ring_.next(bytes).memory, bytes};
}

void CudaExpertMover::copy(const MoveCall& call, const ExpertMove& move) {
  const Slot from = slot_at(move.from_place);
  const Slot to = slot_at(move.to_place);
  for_each_piece(call, move.to_place, [&](size_t plane, size_t at, size_t bytes) {
    cuda::check(cudaMemcpyAsync(to[plane].data() + at, from[plane].data() + at, bytes,
                                cudaMemcpyDeviceToDevice, queue()),
                "cudaMemcpyAsync");
  });
  set_traits(move.to_place, traits_of(move.from_place));
}

void CudaExpertMover::send(const MoveCall& call, const ExpertMove& move) {
  Communicator& communicator = *call.communicator;
  const bool is_direct = carries_device_memory(communicator);
  const Slot slot = slot_at(move.from_place);
  for_each_piece(call, move.from_place, [&](size_t plane, size_t at, size_t bytes) {
    const std::span<const std::byte> piece = slot[plane].subspan(at, bytes);
    if (is_direct) {
      meet(call, move.to_rank);
      return await(call, communicator.begin_send(move.to_rank, {piece, MemoryKind::kDevice}));
    }
    const std::span<std::byte> copied = pinned(bytes);
    cuda::check(
        cudaMemcpyAsync(copied.data(), piece.data(), bytes, cudaMemcpyDeviceToHost, queue()),
        "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(queue()), "cudaStreamSynchronize");
    communicator.send(move.to_rank, copied, kCopyPhase);
  });
  const ExpertTraits traits = traits_of(move.from_place);
  communicator.send(move.to_rank, std::as_bytes(std::span(&traits, 1)), kCopyPhase);
}

void CudaExpertMover::receive(const MoveCall& call, const ExpertMove& move) {
  Communicator& communicator = *call.communicator;
  const bool is_direct = carries_device_memory(communicator);
  const Slot slot = slot_at(move.to_place);
  for_each_piece(call, move.to_place, [&](size_t plane, size_t at, size_t bytes) {
    const std::span<std::byte> piece = slot[plane].subspan(at, bytes);
    if (is_direct) {
      meet(call, move.from_rank);
      return await(call, communicator.begin_recv(move.from_rank, {piece, MemoryKind::kDevice}));
    }
    const std::span<std::byte> copied = pinned(bytes);
    communicator.recv(move.from_rank, copied, kCopyPhase);
    cuda::check(
        cudaMemcpyAsync(piece.data(), copied.data(), bytes, cudaMemcpyHostToDevice, queue()),
        "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(queue()), "cudaStreamSynchronize");
  });
  ExpertTraits traits;
  communicator.recv(move.from_rank, std::as_writable_bytes(std::span(&traits, 1)), kCopyPhase);
  set_traits(move.to_place, traits);
}

// Bytes that nobody writes are zeros, as they were when the layer was made.
ExpertTraits CudaExpertMover::fill_halves(const WeightSource& source, int32_t expert,
                                          Slot& filled) {
  const MlpSource live = all();
  const DeviceArrays arrays(layer_.allocator, to_stream(queue()));
  UploadLanes lanes(source, queue(), layer_.plan.device.ordinal, layer_.context.executor(), rings_);
  ExpertTraits traits;
  for (size_t i = 0; i < kHalves.size(); ++i) {
    const MlpHalf half = kHalves[i];
    CudaMlpWeights& staged = staged_[i];
    const MlpSource one{.problem = live.problem,
                        .experts = {{.mlp = WeightMlp::kRouted,
                                     .expert = expert,
                                     .inner = layer_.plan.part.inner,
                                     .has_bias = layer_.plan.spec.has_bias,
                                     .has_down_bias = layer_.plan.spec.has_bias}},
                        .adds_down_bias = live.adds_down_bias,
                        .forms = live.forms,
                        .only = half,
                        .byte_form = layer_.live.routed.of(half).form};
    if (!has_staged_) staged = allocate_mlp(arrays, one, nullptr);
    for (const ExpertPlane& plane : planes_of(one, staged, half)) {
      cuda::check(cudaMemsetAsync(plane.data, 0, plane.bytes, queue()), "cudaMemsetAsync");
      filled.emplace_back(plane.data, plane.bytes);
    }
    fill_mlp(one, source, lanes, staged, layer_.context);
    const std::vector<uint8_t>& is_short = staged.of(half).has_short_scales;
    const uint64_t all_short = is_short.empty() || is_short.front() != 0 ? 1 : 0;
    (half == MlpHalf::kGateUp ? traits.gate_up_is_short : traits.down_is_short) = all_short;
  }
  has_staged_ = true;
  lanes.finish();
  return traits;
}

// By way of memory of its own, so that what experts have in common is not written.
void CudaExpertMover::fill(const MoveCall& call, const ExpertMove& move) {
  const cuda::Drained drained(queue());
  Slot filled;
  const ExpertTraits traits = fill_halves(*call.source, move.expert, filled);
  const Slot slot = slot_at(move.to_place);
  for (size_t plane = 0; plane < slot.size(); ++plane) {
    cuda::check(cudaMemcpyAsync(slot[plane].data(), filled[plane].data(), slot[plane].size(),
                                cudaMemcpyDeviceToDevice, queue()),
                "cudaMemcpyAsync");
  }
  set_traits(move.to_place, traits);
  between_pieces(call);
}

MoveHashes CudaExpertMover::move(const MoveCall& call) {
  const cuda::DeviceGuard guard(layer_.plan.device.ordinal);
  const BesideCaptures beside;
  await_switch();
  MoveHashes hashes{.sent = std::vector<uint64_t>(call.moves.size(), 0),
                    .received = std::vector<uint64_t>(call.moves.size(), 0)};
  for (size_t i = 0; i < call.moves.size(); ++i) {
    const ExpertMove& move = call.moves[i];
    const bool sends = move.from_rank == call.rank;
    const bool receives = move.to_rank == call.rank;
    if (!sends && !receives) continue;
    if (call.source != nullptr) {
      if (receives) fill(call, move);
    } else if (sends && receives) {
      copy(call, move);
    } else if (sends) {
      send(call, move);
    } else {
      receive(call, move);
    }
    if (sends) hashes.sent[i] = hash(move.from_place);
    if (receives) hashes.received[i] = hash(move.to_place);
  }
  return hashes;
}

void CudaExpertMover::prepare(const EpochPointer& next) {
  const cuda::DeviceGuard guard(layer_.plan.device.ordinal);
  const BesideCaptures beside;
  await_switch();
  layer_.memory.next.prepare(layer_.plan, next, queue());
}

void CudaExpertMover::enter(const EpochPointer& /*next*/) {
  const cuda::DeviceGuard guard(layer_.plan.device.ordinal);
  const BesideCaptures beside;
  {
    const ForwardGate::Closed closed(layer_.gate);
    layer_.memory.next.enter(layer_.live, layer_.fence, queue());
  }
  await_switch();
}

}  // namespace conclave::inline v0
