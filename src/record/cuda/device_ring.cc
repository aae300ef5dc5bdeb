#include "record/device_ring.h"

#include "core/checked.h"
#include "core/device.h"
#include "core/row_stride.h"
#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/device_wait.h"
#include "cuda/memory_place.h"
#include "cuda/stream.h"
#include "record/cuda/ring_kernel.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <algorithm>
#include <cuda_runtime_api.h>
#include <new>
#include <string>

namespace conclave::inline v0::record {
namespace {

constexpr size_t kAlignment = 256;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Where the parts of a ring lie in its memory.
struct Places {
  size_t tokens = 0;
  size_t ids = 0;
  size_t weights = 0;
  size_t bytes = 0;

  Places(int64_t capacity, int64_t slots) {
    const auto rows = static_cast<size_t>(capacity);
    const size_t words = rows * static_cast<size_t>(slots);
    tokens = aligned(sizeof(DeviceRingState));
    ids = tokens + aligned(rows * sizeof(TokenKey));
    weights = ids + aligned(words * sizeof(int32_t));
    bytes = weights + aligned(words * sizeof(float));
  }
};

static_assert(sizeof(TokenKey) == 2 * sizeof(int64_t), "rows of tokens are copied as they are");

[[noreturn]] void refuse_memory(int64_t capacity, const RecordedLayer& layer) {
  throw Error(ErrorCode::kOutOfMemory,
              {.what = "no device memory for a ring of " + std::to_string(capacity) +
                       " tokens of layer " + std::to_string(layer.layer),
               .tensor = "capacity"});
}

void* allocate(DeviceAllocator& allocator, size_t bytes, Stream stream) {
  try {
    return allocator.allocate(bytes, kAlignment, stream);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// All work of the device has ended when this returns, whichever stream holds it.
void wait_for_device() {
  if (cuda::wait_for_device()) return;
  throw Error(ErrorCode::kDevice,
              {.what = "a recorder waits for the work of its device, of which a stream is being "
                       "captured",
               .hint = "let captures end before it is read or cleared"});
}

// Copies to the host, on a stream of its own that no other waits for.
class Reader {
 public:
  explicit Reader(const std::byte* memory) : memory_(memory), stream_(cuda::make_stream()) {}

  template <class T>
  void read(size_t place, size_t first, size_t count, T* to) const {
    if (count == 0) return;
    cuda::check(cudaMemcpyAsync(to, memory_ + place + first * sizeof(T), count * sizeof(T),
                                cudaMemcpyDeviceToHost, stream_.get()),
                "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
  }

 private:
  const std::byte* memory_;
  cuda::OwnedStream stream_;
};

int64_t stride_of(const ConstTensorView& rows) {
  if (rows.empty()) return 0;
  return row_stride(rows);
}

}  // namespace

struct DeviceRing::State : DeviceRingState {};

DeviceRing::DeviceRing(const Context& context, const RecordedLayer& layer, int64_t capacity,
                       WhenFull when_full)
    : layer_(layer),
      capacity_(capacity),
      when_full_(when_full),
      ordinal_(parse_device(context.device()).ordinal),
      allocator_(context.device_allocator()) {
  const auto words = checked_mul(capacity, layer.num_slots);
  constexpr int64_t kMostWords = int64_t{1} << 50;
  if (!words || *words > kMostWords) refuse_memory(capacity, layer);
  bytes_ = Places(capacity, layer.num_slots).bytes;
  const cuda::DeviceGuard guard(ordinal_);
  const cuda::OwnedStream stream = cuda::make_stream();
  memory_ = allocate(*allocator_, bytes_, to_stream(stream.get()));
  if (memory_ == nullptr) refuse_memory(capacity, layer);
  try {
    cuda::check(cudaMemsetAsync(memory_, 0, sizeof(DeviceRingState), stream.get()),
                "cudaMemsetAsync");
    cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  } catch (const Error&) {
    allocator_->deallocate(memory_, bytes_, {});
    throw;
  }
}

DeviceRing::~DeviceRing() {
  // Forwards may write here until the process ends if a capture lets nobody wait.
  if (cuda::has_ended(ordinal_)) allocator_->deallocate(memory_, bytes_, {});
}

void DeviceRing::record(const DeviceRoutingRows& rows, Stream stream) {
  const cuda::DeviceGuard guard(ordinal_);
  cuda::check_place("topk_ids", rows.topk_ids.data, ordinal_);
  cuda::check_place("topk_weights", rows.topk_weights.data, ordinal_);
  cuda::check_place("tokens", rows.tokens.data, ordinal_);
  cuda::check_place("num_tokens", rows.num_tokens, ordinal_);
  auto* const memory = static_cast<std::byte*>(memory_);
  const Places places(capacity_, layer_.num_slots);
  append_rows({.state = reinterpret_cast<DeviceRingState*>(memory),
               .ring_tokens = reinterpret_cast<int64_t*>(memory + places.tokens),
               .ring_ids = reinterpret_cast<int32_t*>(memory + places.ids),
               .ring_weights = reinterpret_cast<float*>(memory + places.weights),
               .capacity = capacity_,
               .slots = static_cast<int32_t>(layer_.num_slots),
               .num_ids = layer_.num_ids,
               .when_full = when_full_,
               .ids = rows.topk_ids.data,
               .ids_dtype = rows.topk_ids.dtype,
               .ids_stride = stride_of(rows.topk_ids),
               .weights = static_cast<const float*>(rows.topk_weights.data),
               .weights_stride = stride_of(rows.topk_weights),
               .tokens = static_cast<const int64_t*>(rows.tokens.data),
               .tokens_stride = stride_of(rows.tokens),
               .num_tokens = rows.topk_ids.shape[0],
               .live_tokens = rows.num_tokens},
              to_cuda(stream));
}

DeviceRing::State DeviceRing::read_state() const {
  State state;
  Reader(static_cast<const std::byte*>(memory_))
      .read(0, 0, 1, static_cast<DeviceRingState*>(&state));
  const std::string name = "layer " + std::to_string(layer_.layer);
  if (state.bad_ids != 0) {
    const auto slots = static_cast<uint64_t>(layer_.num_slots);
    const uint64_t at = state.first_bad_id - 1;
    throw Error(ErrorCode::kExpertId,
                {.what = "an id was recorded that " + name + " has not, at token " +
                         std::to_string(at / slots) + " since the last clear, slot " +
                         std::to_string(at % slots),
                 .tensor = "topk_ids",
                 .found = std::to_string(state.bad_ids) + " such ids",
                 .limit = "-1 to " + std::to_string(layer_.num_ids - 1)});
  }
  if (state.refused != 0) {
    throw Error(ErrorCode::kState,
                {.what = "the recorder of " + name + " was full",
                 .found = std::to_string(state.refused) + " tokens more",
                 .limit = std::to_string(capacity_) + " tokens",
                 .hint = "clear it, and write it more often or give it a larger capacity"});
  }
  return state;
}

RingCounts DeviceRing::counts() const {
  const cuda::DeviceGuard guard(ordinal_);
  wait_for_device();
  const auto given = static_cast<int64_t>(read_state().given);
  return {.given = given, .held = std::min(given, capacity_)};
}

RecordedRows DeviceRing::copy() const {
  const cuda::DeviceGuard guard(ordinal_);
  wait_for_device();
  const auto given = static_cast<int64_t>(read_state().given);
  const auto held = static_cast<size_t>(std::min(given, capacity_));
  const auto slots = static_cast<size_t>(layer_.num_slots);
  RecordedRows rows;
  rows.layer = layer_;
  rows.dropped_tokens = given - static_cast<int64_t>(held);
  rows.tokens.resize(held);
  rows.topk_ids.resize(held * slots);
  rows.topk_weights.resize(held * slots);
  // Those that a ring without room has not taken lie nowhere.
  const bool goes_on = when_full_ == WhenFull::kDropOldest && given > capacity_;
  const size_t oldest = goes_on ? static_cast<size_t>(given % capacity_) : 0;
  const Places places(capacity_, layer_.num_slots);
  const Reader reader(static_cast<const std::byte*>(memory_));
  const size_t before = held - oldest;
  const auto read_rows = [&](size_t place, size_t columns, auto* to) {
    reader.read(place, oldest * columns, before * columns, to);
    reader.read(place, 0, oldest * columns, to + before * columns);
  };
  read_rows(places.tokens, 1, rows.tokens.data());
  read_rows(places.ids, slots, rows.topk_ids.data());
  read_rows(places.weights, slots, rows.topk_weights.data());
  return rows;
}

void DeviceRing::clear() {
  const cuda::DeviceGuard guard(ordinal_);
  wait_for_device();
  const cuda::OwnedStream stream = cuda::make_stream();
  cuda::check(cudaMemsetAsync(memory_, 0, sizeof(DeviceRingState), stream.get()),
              "cudaMemsetAsync");
  cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
}

}  // namespace conclave::inline v0::record
