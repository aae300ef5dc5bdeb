// Books named pieces of one scratch buffer at plan time and slices it at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// One cache line; also the widest vector store.
inline constexpr size_t kWorkspaceAlignment = 64;

// Counters at the head of a device's workspace; they are zero between forwards.
inline constexpr size_t kWorkspaceCounterBytes = 256;

// Offsets are a pure function of the order of calls.
struct WorkspaceSlice {
  size_t offset = 0;
  size_t bytes = 0;
};

class WorkspaceLayout {
 public:
  // Throws Error(kSizeOverflow) if count * sizeof(T) does not fit.
  template <class T>
  WorkspaceSlice book(int64_t count) {
    return book_bytes(count, sizeof(T));
  }
  WorkspaceSlice book_bytes(int64_t count, size_t element_bytes);
  size_t total_bytes() const noexcept { return total_; }

 private:
  size_t total_ = 0;
};

template <class T>
T* slice_as(std::span<std::byte> workspace, const WorkspaceSlice& slice) {
  return static_cast<T*>(static_cast<void*>(workspace.data() + slice.offset));
}

}  // namespace conclave::inline v0
