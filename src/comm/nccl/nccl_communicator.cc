#include "comm/nccl/nccl_communicator.h"

#include "comm/deadline.h"
#include "comm/message/pause.h"
#include "cuda/check.h"
#include "cuda/device_info.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cuda_runtime_api.h>
#include <span>
#include <string>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

// Tells handles of the host's communicator from those of this one.
constexpr uint64_t kOnHost = uint64_t{1} << 63;
// For a failure to be found once a deadline is over, and for work to end when the rank leaves.
constexpr std::chrono::nanoseconds kVerdictTime = std::chrono::seconds(3);
// For a peer's word on why the host's operations have ended.
constexpr std::chrono::nanoseconds kWordTime = std::chrono::milliseconds(200);

std::chrono::nanoseconds with_verdict_time(std::chrono::nanoseconds deadline) {
  const bool fits = deadline < std::chrono::nanoseconds::max() - kVerdictTime;
  return fits ? deadline + kVerdictTime : deadline;
}

bool is_message(CommKind kind) { return !is_collective(kind); }

// A view of no bytes says where it would lie, too: both halves of a message go the same way.
bool is_on_device(const CommOperation& operation) {
  if (operation.stream.handle != nullptr) return true;
  if (operation.kind == CommKind::kAllToAllV) {
    return operation.exchange.memory == MemoryKind::kDevice;
  }
  return operation.send.memory == MemoryKind::kDevice ||
         operation.recv.memory == MemoryKind::kDevice;
}

Marks* make_marks() {
  void* memory = nullptr;
  cuda::check(cudaHostAlloc(&memory, sizeof(Marks), cudaHostAllocMapped | cudaHostAllocPortable),
              "cudaHostAlloc");
  return new (memory) Marks{};
}

Marks* as_device_addresses(Marks* marks) {
  void* memory = nullptr;
  cuda::check(cudaHostGetDevicePointer(&memory, marks, 0), "cudaHostGetDevicePointer");
  return static_cast<Marks*>(memory);
}

uint32_t read(const uint32_t& mark) {
  const uint32_t value = *static_cast<const volatile uint32_t*>(&mark);
  std::atomic_thread_fence(std::memory_order_acquire);
  return value;
}

void check_pointer(const char* name, const void* data, int64_t bytes, MemoryKind kind,
                   int32_t ordinal) {
  if (bytes == 0) return;
  if (kind == MemoryKind::kHost) {
    throw Error(ErrorCode::kDevice, {.what = "an operation with a stream has host memory",
                                     .tensor = name,
                                     .expected = "device memory"});
  }
  cudaPointerAttributes at{};
  cuda::check(cudaPointerGetAttributes(&at, data), "cudaPointerGetAttributes");
  const bool is_there =
      (at.type == cudaMemoryTypeDevice && at.device == ordinal) || at.type == cudaMemoryTypeManaged;
  if (is_there) return;
  throw Error(
      ErrorCode::kDevice,
      {.what = "memory of an operation lies elsewhere",
       .tensor = name,
       .expected = fmt::format("memory of cuda:{}, the communicator's device", ordinal),
       .found = at.type == cudaMemoryTypeDevice ? fmt::format("memory of cuda:{}", at.device)
                                                : std::string("host memory")});
}

void check_alignment(const char* name, const void* data, DType dtype) {
  const auto element = static_cast<uintptr_t>(byte_size(dtype));
  if (reinterpret_cast<uintptr_t>(data) % element == 0) return;
  throw Error(ErrorCode::kMisaligned, {.what = "a reduction reads whole elements",
                                       .tensor = name,
                                       .expected = fmt::format("a multiple of {} bytes", element)});
}

}  // namespace

NcclCommunicator::NcclCommunicator(Parts parts)
    : group_(std::move(parts.group)),
      host_(std::move(parts.host)),
      timeout_(parts.timeout),
      marks_(make_marks()),
      device_marks_(as_device_addresses(marks_)),
      windows_(std::move(parts.windows)),
      one_launch_(windows_ != nullptr ? Support::yes() : Support::no(std::move(parts.no_windows))),
      exchange_(*group_, host_->rank(), host_->size(), windows_.get(), &device_marks_->stop),
      stream_(cuda::make_stream()),
      slots_(static_cast<size_t>(kGraphCell)),
      numbers_(static_cast<size_t>(kMarkCells), 0) {
  messages_.reserve(kMaxClaims);
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].cell = static_cast<int32_t>(i);
    slots_[i].before = cuda::make_event();
    slots_[i].done = cuda::make_event();
  }
  watch_ = std::make_unique<NcclWatch>(NcclWatch::Parts{
      .peers = std::move(parts.peers),
      .group = *group_,
      .marks = *marks_,
      .end_host = [this](const std::string& why) { host_->abort(why); },
      .find_disagreement = [this] { return exchange_.find_disagreement(); },
      .stop_waits = [this] { *static_cast<volatile uint32_t*>(&marks_->stop) = 1; }});
}

// Work that streams follow is waited for; peers of other work learn that this rank is gone.
NcclCommunicator::~NcclCommunicator() {
  const auto until = time_after(std::min(timeout_, kVerdictTime));
  const auto open = [&](Standing standing) {
    return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
      return slot.standing == standing && !(standing != Standing::kPending && is_over(slot));
    });
  };
  for (int64_t round = 0; open(Standing::kFollowed) && !watch_->failed() && Clock::now() < until;) {
    rest_by_the_clock(++round);
  }
  if (open(Standing::kFollowed) || open(Standing::kBegun) || open(Standing::kPending)) {
    watch_->fail(ErrorCode::kCommPeerLost, rank(),
                 fmt::format("rank {} was destroyed during an operation", rank()));
  }
  watch_.reset();
  group_->end_work();
  // The end of what was aborted still marks.
  const auto drained = time_after(kVerdictTime);
  for (int64_t round = 0;
       cudaStreamQuery(stream_.get()) == cudaErrorNotReady && Clock::now() < drained;) {
    rest_by_the_clock(++round);
  }
  if (cudaStreamQuery(stream_.get()) == cudaErrorNotReady) {  // the marks stay
    if (windows_ != nullptr) windows_->keep_mapped();
    return;
  }
  static_cast<void>(cudaFreeHost(marks_));
}

void NcclCommunicator::meet() {
  guarded([&] {
    constexpr size_t kBytes = 256;
    cuda::DeviceBuffer send(kBytes);
    cuda::DeviceBuffer recv(kBytes);
    cuda::check(cudaMemset(send.data(), 0, kBytes), "cudaMemset");
    cuda::check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
    const ConstByteView from(std::span<const std::byte>(send.data(), kBytes), MemoryKind::kDevice);
    const ByteView to(std::span<std::byte>(recv.data(), kBytes), MemoryKind::kDevice);
    all_reduce(from, to, DType::kF32, ReduceOp::kSum, "connect");
  });
  watch_->check("connect");
}

Support NcclCommunicator::supports(CommFeature feature) const {
  if (feature == CommFeature::kPeerMemory) {
    return Support::no("ranks of the communicator nccl keep their memory to themselves");
  }
  if (feature == CommFeature::kShrink) return host_->supports(feature);
  return Support::yes();
}

// Turns what a transport throws into the failure of this communicator.
template <class Body>
void NcclCommunicator::guarded(const Body& body) {
  try {
    body();
  } catch (const CommError& error) {
    if (watch_->failed()) throw;
    watch_->fail(error.code(), error.peer(), text_of(error));
    throw;
  } catch (const Error& error) {
    watch_->fail(ErrorCode::kCommAborted, rank(), error.what());
    throw;
  }
}

template <class Body>
auto NcclCommunicator::on_host(std::string_view phase, const Body& body) {
  try {
    return body();
  } catch (const CommError& error) {
    // Where a failure on a device has ended it, that is the one to report.
    const auto until = time_after(kWordTime);
    for (int64_t round = 0;
         error.code() == ErrorCode::kCommAborted && !watch_->failed() && Clock::now() < until;) {
      rest_by_the_clock(++round);
    }
    watch_->check(phase);
    watch_->fail(error.code(), error.peer(), text_of(error));
    throw;
  }
}

CommHandle NcclCommunicator::start(const CommOperation& operation) {
  if (!is_on_device(operation)) return start_on_host(operation);
  CommOperation plain = operation;
  if (plain.kind == CommKind::kAllToAllV) plain.dtype = DType::kU8;  // nothing is added up
  return start_on_device(plain);
}

CommHandle NcclCommunicator::start_on_host(const CommOperation& operation) {
  if (watch_->failed()) {
    const std::lock_guard lock(mutex_);
    return {next_sequence_++};
  }
  return on_host("begin", [&] { return CommHandle{host_->begin(operation).sequence | kOnHost}; });
}

void NcclCommunicator::check_memory(const CommOperation& operation) const {
  const int32_t ordinal = group_->ordinal();
  const auto most = [](std::span<const int64_t> bytes) {
    return bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
  };
  if (operation.kind == CommKind::kAllToAllV) {
    const AllToAllV& exchange = operation.exchange;
    check_pointer("send", exchange.send, most(exchange.send_bytes), exchange.memory, ordinal);
    check_pointer("recv", exchange.recv, most(exchange.recv_bytes), exchange.memory, ordinal);
    return;
  }
  const ConstByteView& send = operation.send;
  const ByteView& recv = operation.recv;
  check_pointer("send", send.data(), send.size(), send.memory, ordinal);
  check_pointer("recv", recv.data(), recv.size(), recv.memory, ordinal);
  if (!is_reduction(operation.kind)) return;
  check_alignment("send", send.data(), operation.dtype);
  check_alignment("recv", recv.data(), operation.dtype);
}

// No peer sees how many bytes a rank sends to itself.
void NcclCommunicator::check_own_bytes(const CommOperation& operation) {
  if (operation.kind != CommKind::kAllToAllV) return;
  const auto own = static_cast<size_t>(rank());
  const Claim mine{.kind = CommKind::kAllToAllV,
                   .offered = operation.exchange.send_bytes[own],
                   .expected = operation.exchange.recv_bytes[own]};
  if (auto why = disagreement(mine, rank(), mine, rank())) {
    watch_->fail(ErrorCode::kCommMismatch, rank(), std::move(*why));
  }
}

NcclCommunicator::Capture NcclCommunicator::capture_of(Stream stream) const {
  if (stream.handle == nullptr) return kNoCapture;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cuda::check(cudaStreamGetCaptureInfo(to_cuda(stream), &status, &id), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusNone ? kNoCapture : id;
}

bool NcclCommunicator::has_followed_all(Stream stream, Capture capture, uint64_t sequence) const {
  return stream.handle != nullptr && followed_.stream == stream.handle &&
         followed_.capture == capture && followed_.sequence + 1 == sequence;
}

CommHandle NcclCommunicator::start_on_device(const CommOperation& operation) {
  check_memory(operation);
  check_own_bytes(operation);
  return begin_on_device(operation, nullptr);
}

CommHandle NcclCommunicator::begin_on_device(const CommOperation& operation,
                                             const WindowKernel* kernel) {
  if (const int32_t gone = watch_->rank_that_left(operation.peer); gone >= 0) {
    watch_->fail(ErrorCode::kCommPeerLost, gone, fmt::format("rank {} was destroyed", gone));
  }
  Lock lock(mutex_);
  if (watch_->failed()) return {next_sequence_++};
  const cuda::DeviceGuard guard(group_->ordinal());
  Slot& slot = take_slot(lock);
  slot.operation = operation;
  slot.sequence = next_sequence_++;
  slot.is_on_stream = false;
  const CommHandle handle{slot.sequence};
  try {
    if (is_message(operation.kind)) {
      if (operation.stream.handle != nullptr) {
        cuda::check(cudaEventRecord(slot.before.get(), to_cuda(operation.stream)),
                    "cudaEventRecord");
      }
      slot.standing = Standing::kPending;
    } else {
      enqueue_messages();
      slot.standing = Standing::kBegun;
      enqueue(slot, kernel);
    }
  } catch (const std::exception& error) {
    watch_->fail(ErrorCode::kCommAborted, rank(), error.what());
  }
  return handle;
}

// An all-to-all whose bytes have a type is added up where it arrives.
CommHandle NcclCommunicator::begin_sum_of_parts(const PartsOfRanks& parts, Stream stream) {
  const auto own = static_cast<size_t>(rank());
  std::array<int64_t, kMaxWindowRanks> recv_bytes;
  recv_bytes.fill(parts.bytes[own]);
  const std::array<int64_t, kMaxWindowRanks> recv_offsets{};
  return start_on_device(
      {.kind = CommKind::kAllToAllV,
       .exchange = {.send = parts.parts,
                    .send_bytes = parts.bytes,
                    .send_offsets = parts.offsets,
                    .recv = parts.out,
                    .recv_bytes = std::span(recv_bytes).first(parts.bytes.size()),
                    .recv_offsets = std::span(recv_offsets).first(parts.bytes.size()),
                    .memory = MemoryKind::kDevice},
       .dtype = DType::kF32,
       .stream = stream});
}

int64_t NcclCommunicator::window_bytes() const noexcept {
  return windows_ == nullptr ? 0 : windows_->blocks().slot_bytes;
}

CommHandle NcclCommunicator::begin_kernel(const WindowMessages& messages,
                                          const WindowKernel& kernel, Stream stream) {
  return begin_on_device({.kind = CommKind::kAllToAllV,
                          .exchange = {.send_bytes = messages.send_bytes,
                                       .send_offsets = {},
                                       .recv_bytes = messages.recv_bytes,
                                       .recv_offsets = {},
                                       .memory = MemoryKind::kDevice},
                          .dtype = messages.dtype,
                          .stream = stream},
                         &kernel);
}

NcclCommunicator::Slot& NcclCommunicator::take_slot(Lock& lock) {
  const auto until = time_after(timeout_);
  for (int64_t round = 0;; ++round) {
    bool some_will_end = false;
    for (Slot& slot : slots_) {
      if (slot.standing == Standing::kFollowed && is_over(slot)) slot.standing = Standing::kFree;
      if (slot.standing == Standing::kFree) return slot;
      some_will_end |= slot.standing == Standing::kFollowed;
    }
    if (!some_will_end || watch_->failed() || Clock::now() >= until) break;
    // The host is as many operations ahead of the device as there are slots.
    lock.unlock();
    rest_by_the_clock(round);
    lock.lock();
  }
  throw Error(ErrorCode::kState, {.what = "too many operations are begun and not waited for",
                                  .found = std::to_string(slots_.size()),
                                  .limit = std::to_string(slots_.size())});
}

// An operation that an abort has ended on the device is not complete.
bool NcclCommunicator::is_over(const Slot& slot) const {
  const bool has_ended =
      has_passed(read(marks_->ended[static_cast<size_t>(slot.cell)]), slot.number);
  return watch_->failed() ? watch_->had_ended(slot.cell, slot.number) : has_ended;
}

MarkPlace NcclCommunicator::next_place(Slot& slot, bool captured) {
  const auto own = static_cast<int32_t>(&slot - slots_.data());
  slot.cell = captured ? kGraphCell : own;
  slot.number = captured ? 0 : ++numbers_[static_cast<size_t>(own)];
  return {.marks = device_marks_, .cell = slot.cell};
}

void NcclCommunicator::enqueue(Slot& slot, const WindowKernel* kernel) {
  const Stream stream = slot.operation.stream;
  const Capture capture = capture_of(stream);
  const MarkPlace place = next_place(slot, capture != kNoCapture);
  const bool is_behind = has_followed_all(stream, capture, slot.sequence);
  if (kernel != nullptr && is_behind) return enqueue_on(stream, capture, slot, *kernel, place);
  if (left_.event != nullptr && left_.capture == capture) {
    cuda::check(cudaStreamWaitEvent(stream_.get(), left_.event, 0), "cudaStreamWaitEvent");
  }
  left_ = {};
  if (stream.handle != nullptr) {
    cuda::join(to_cuda(stream), stream_.get(), slot.before.get());
  }
  if (kernel == nullptr) {
    exchange_.collective(slot.operation, place, stream_.get());
  } else {
    exchange_.through_windows(slot.operation, *kernel, place, stream_.get());
  }
  cuda::check(cudaEventRecord(slot.done.get(), stream_.get()), "cudaEventRecord");
}

// The kernels of a stream then follow each other without the edges of two streams between them.
void NcclCommunicator::enqueue_on(Stream stream, Capture capture, Slot& slot,
                                  const WindowKernel& kernel, const MarkPlace& place) {
  exchange_.through_windows(slot.operation, kernel, place, to_cuda(stream));
  cuda::check(cudaEventRecord(slot.done.get(), to_cuda(stream)), "cudaEventRecord");
  slot.is_on_stream = true;
  if (capture == kNoCapture) {
    cuda::check(cudaStreamWaitEvent(stream_.get(), slot.done.get(), 0), "cudaStreamWaitEvent");
  } else {
    // A stream that joins a capture has to be joined by it.
    left_ = {.capture = capture, .event = slot.done.get()};
  }
}

void NcclCommunicator::enqueue_messages() {
  messages_.clear();
  std::array<Slot*, kGraphCell> together{};
  size_t count = 0;
  for (Slot& slot : slots_) {
    if (slot.standing == Standing::kPending) together[count++] = &slot;
  }
  if (count == 0) return;
  // A message is matched by its turn, not by its slot.
  std::sort(together.begin(), together.begin() + count,
            [](const Slot* a, const Slot* b) { return a->sequence < b->sequence; });
  bool captured = false;
  for (size_t i = 0; i < count; ++i) {
    Slot& slot = *together[i];
    messages_.push_back(slot.operation);
    captured = captured || capture_of(slot.operation.stream) != kNoCapture;
    if (slot.operation.stream.handle == nullptr) continue;
    cuda::check(cudaStreamWaitEvent(stream_.get(), slot.before.get(), 0), "cudaStreamWaitEvent");
  }
  // One launch has one mark, that of the first; the others' cells stay as they are.
  const MarkPlace place = next_place(*together[0], captured);
  exchange_.messages(messages_, place, stream_.get());
  for (size_t i = 0; i < count; ++i) {
    Slot& slot = *together[i];
    slot.standing = Standing::kBegun;
    slot.cell = together[0]->cell;
    slot.number = together[0]->number;
    cuda::check(cudaEventRecord(slot.done.get(), stream_.get()), "cudaEventRecord");
  }
}

NcclCommunicator::Slot& NcclCommunicator::slot_of(CommHandle handle, std::string_view phase) {
  const auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& it) {
    return (it.standing == Standing::kPending || it.standing == Standing::kBegun) &&
           it.sequence == handle.sequence;
  });
  if (slot != slots_.end()) return *slot;
  watch_->check(phase);
  throw Error(ErrorCode::kInvalidArgument, {.what = "no operation of this handle is under way",
                                            .tensor = "handle",
                                            .found = std::to_string(handle.sequence)});
}

void NcclCommunicator::wait(CommHandle handle, std::chrono::nanoseconds deadline,
                            std::string_view phase) {
  if ((handle.sequence & kOnHost) != 0) {
    return on_host(phase, [&] { host_->wait({handle.sequence & ~kOnHost}, deadline, phase); });
  }
  const auto until = time_after(deadline);
  const auto last = time_after(with_verdict_time(deadline));
  bool has_asked = false;
  for (int64_t round = 0;; ++round) {
    if (test(handle, phase)) break;
    const auto now = Clock::now();
    if (now >= last) {
      watch_->fail(ErrorCode::kCommTimeout, -1, "an operation did not complete in time");
    } else if (now >= until && !has_asked) {
      const std::lock_guard lock(mutex_);
      watch_->find_culprit(slot_of(handle, phase).operation.peer, deadline);
      has_asked = true;
    }
    rest_by_the_clock(round);
  }
  const std::lock_guard lock(mutex_);
  slot_of(handle, phase).standing = Standing::kFree;
}

bool NcclCommunicator::test(CommHandle handle, std::string_view phase) {
  if ((handle.sequence & kOnHost) != 0) {
    return on_host(phase, [&] { return host_->test({handle.sequence & ~kOnHost}, phase); });
  }
  const std::lock_guard lock(mutex_);
  const cuda::DeviceGuard guard(group_->ordinal());
  Slot& slot = slot_of(handle, phase);
  if (slot.standing == Standing::kPending && !watch_->failed()) {
    try {
      enqueue_messages();
    } catch (const CommError& error) {
      watch_->fail(error.code(), error.peer(), text_of(error));
    } catch (const std::exception& error) {
      watch_->fail(ErrorCode::kCommAborted, rank(), error.what());
    }
  }
  if (slot.standing == Standing::kBegun && slot.cell == kGraphCell) {
    throw Error(ErrorCode::kState,
                {.what = "an operation of a graph is done whenever the graph runs",
                 .tensor = "handle",
                 .hint = "let a stream follow it: wait_on"});
  }
  if (slot.standing == Standing::kBegun && is_over(slot)) {
    // Whoever disagrees has shown it by now: a result that is not what was meant is none.
    if (read(marks_->mismatches) == 0) return true;
    watch_->fail(ErrorCode::kCommMismatch, marks_->theirs.peer,
                 text_of(ClaimPair{marks_->mine, marks_->theirs}, rank()));
  }
  if (watch_->failed()) slot.standing = Standing::kFree;
  watch_->check(phase);
  const int32_t gone = watch_->rank_that_left(slot.operation.peer);
  if (gone >= 0 && is_message(slot.operation.kind)) {
    watch_->fail(ErrorCode::kCommPeerLost, gone, fmt::format("rank {} was destroyed", gone));
  }
  return false;
}

void NcclCommunicator::wait_on(Stream stream, CommHandle handle, std::chrono::nanoseconds deadline,
                               std::string_view phase) {
  const std::lock_guard lock(mutex_);
  if ((handle.sequence & kOnHost) != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a stream cannot follow an operation on host memory",
                 .tensor = "handle",
                 .hint = "begin it with a stream, or wait for it"});
  }
  const cuda::DeviceGuard guard(group_->ordinal());
  Slot& slot = slot_of(handle, phase);
  if (slot.standing == Standing::kPending && !watch_->failed()) {
    guarded([&] { enqueue_messages(); });
  }
  if (watch_->failed()) {
    slot.standing = Standing::kFree;
    watch_->check(phase);
  }
  if (!(slot.is_on_stream && slot.operation.stream.handle == stream.handle)) {
    cuda::check(cudaStreamWaitEvent(to_cuda(stream), slot.done.get(), 0), "cudaStreamWaitEvent");
  }
  followed_ = {.stream = stream.handle, .capture = capture_of(stream), .sequence = slot.sequence};
  if (slot.cell == kGraphCell) {
    slot.standing = Standing::kFree;
    return watch_->follow_graphs(deadline, phase);
  }
  slot.standing = Standing::kFollowed;
  watch_->follow({.cell = slot.cell,
                  .number = slot.number,
                  .peer = slot.operation.peer,
                  .deadline = deadline});
}

void NcclCommunicator::abort(std::string_view reason) noexcept {
  watch_->fail(ErrorCode::kCommAborted, rank(), std::string(reason));
}

}  // namespace conclave::inline v0::comm
