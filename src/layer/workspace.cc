#include "core/workspace_layout.h"
#include "layer/engine.h"

#include "conclave/error.h"
#include "conclave/layer.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr size_t kDeviceAlignment = 256;

template <class Allocate>
std::byte* allocate_or_throw(size_t bytes, const Allocate& allocate) {
  void* data = nullptr;
  try {
    data = allocate();
  } catch (const std::bad_alloc&) {
    data = nullptr;
  }
  if (data != nullptr) return static_cast<std::byte*>(data);
  throw Error(ErrorCode::kOutOfMemory, {.what = "no memory for a workspace",
                                        .expected = std::to_string(bytes) + " bytes",
                                        .hint = "plan for fewer tokens: LayerOptions.max_tokens"});
}

void check_memory(std::span<const std::byte> memory, size_t alignment) {
  if (memory.data() == nullptr && !memory.empty()) {
    throw Error(ErrorCode::kNullPointer, "null workspace memory");
  }
  if (reinterpret_cast<uintptr_t>(memory.data()) % alignment != 0) {
    throw Error(ErrorCode::kMisaligned, {.what = "workspace memory is not aligned",
                                         .expected = "a multiple of " + std::to_string(alignment)});
  }
}

// Clears on the caller's stream, or on a stream of its own that it waits for.
void clear_counters(const DeviceRuntime& runtime, std::span<std::byte> memory, Stream stream) {
  const size_t bytes = std::min(memory.size(), kWorkspaceCounterBytes);
  if (bytes == 0) return;
  if (stream.handle != nullptr) return runtime.fill(memory.data(), 0, bytes, stream);
  const Stream own = runtime.make_stream();
  try {
    runtime.fill(memory.data(), 0, bytes, own);
    runtime.synchronize(own);
  } catch (...) {
    runtime.destroy_stream(own);
    throw;
  }
  runtime.destroy_stream(own);
}

}  // namespace

Workspace::Workspace(const Context& context, size_t bytes, Stream stream) : stream_(stream) {
  const DeviceRuntime* const runtime = device_runtime(context);
  kind_ = runtime != nullptr ? MemoryKind::kDevice : MemoryKind::kHost;
  // An empty workspace has no memory to free.
  if (bytes == 0) return;
  if (runtime == nullptr) {
    allocator_ = &context.host_allocator();
    memory_ = {
        allocate_or_throw(bytes, [&] { return allocator_->allocate(bytes, kWorkspaceAlignment); }),
        bytes};
    return;
  }
  DeviceAllocator& allocator = *context.device_allocator();
  std::byte* const data =
      allocate_or_throw(bytes, [&] { return allocator.allocate(bytes, kDeviceAlignment, stream); });
  memory_ = {data, bytes};
  try {
    check_memory(memory_, kDeviceAlignment);
    clear_counters(*runtime, memory_, stream);
  } catch (...) {
    allocator.deallocate(data, bytes, stream);
    throw;
  }
  device_allocator_ = &allocator;
}

Workspace::Workspace(std::span<std::byte> memory) : memory_(memory) {
  check_memory(memory, kWorkspaceAlignment);
}

Workspace::Workspace(const Context& context, std::span<std::byte> memory, Stream stream)
    : stream_(stream), memory_(memory) {
  const DeviceRuntime* const runtime = device_runtime(context);
  kind_ = runtime != nullptr ? MemoryKind::kDevice : MemoryKind::kHost;
  check_memory(memory, runtime != nullptr ? kDeviceAlignment : kWorkspaceAlignment);
  if (runtime == nullptr) return;
  runtime->check_place("workspace", memory.data());
  clear_counters(*runtime, memory, stream);
}

Workspace::Workspace(Workspace&& other) noexcept { *this = std::move(other); }

Workspace& Workspace::operator=(Workspace&& other) noexcept {
  std::swap(allocator_, other.allocator_);
  std::swap(device_allocator_, other.device_allocator_);
  std::swap(stream_, other.stream_);
  std::swap(kind_, other.kind_);
  std::swap(memory_, other.memory_);
  return *this;
}

Workspace::~Workspace() {
  if (memory_.empty()) return;
  if (allocator_ != nullptr) allocator_->deallocate(memory_.data(), memory_.size());
  if (device_allocator_ != nullptr) {
    device_allocator_->deallocate(memory_.data(), memory_.size(), stream_);
  }
}

}  // namespace conclave::inline v0
