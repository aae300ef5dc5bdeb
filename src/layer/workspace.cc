#include "core/workspace_layout.h"

#include "conclave/error.h"
#include "conclave/layer.h"

#include <cstdint>
#include <new>
#include <string>
#include <utility>

namespace conclave::inline v0 {

Workspace::Workspace(const Context& context, size_t bytes) : allocator_(&context.host_allocator()) {
  // An empty workspace has nothing to give back.
  if (bytes == 0) return;
  void* data = nullptr;
  try {
    data = allocator_->allocate(bytes, kWorkspaceAlignment);
  } catch (const std::bad_alloc&) {
    data = nullptr;
  }
  if (data == nullptr) {
    throw Error(ErrorCode::kOutOfMemory,
                {.what = "no memory for a workspace",
                 .expected = std::to_string(bytes) + " bytes",
                 .hint = "plan for fewer tokens: LayerOptions::max_tokens"});
  }
  memory_ = {static_cast<std::byte*>(data), bytes};
}

Workspace::Workspace(std::span<std::byte> memory) : memory_(memory) {
  if (memory.data() == nullptr && !memory.empty()) {
    throw Error(ErrorCode::kNullPointer, "null workspace memory");
  }
  if (reinterpret_cast<uintptr_t>(memory.data()) % kWorkspaceAlignment != 0) {
    throw Error(ErrorCode::kMisaligned,
                {.what = "workspace memory is not aligned",
                 .expected = "a multiple of " + std::to_string(kWorkspaceAlignment)});
  }
}

Workspace::Workspace(Workspace&& other) noexcept
    : allocator_(std::exchange(other.allocator_, nullptr)),
      memory_(std::exchange(other.memory_, {})) {}

Workspace& Workspace::operator=(Workspace&& other) noexcept {
  std::swap(allocator_, other.allocator_);
  std::swap(memory_, other.memory_);
  return *this;
}

Workspace::~Workspace() {
  if (allocator_ != nullptr && !memory_.empty()) {
    allocator_->deallocate(memory_.data(), memory_.size());
  }
}

}  // namespace conclave::inline v0
