// Device memory of a layer, from the context's allocator.
#pragma once

#include "conclave/context.h"

#include <cstddef>
#include <utility>

namespace conclave::inline v0 {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Allocates 256-byte aligned memory, not cleared; no bytes allocate nothing. `what` names it in
  // messages. Throws Error(kOutOfMemory).
  DeviceMemory(DeviceAllocator& allocator, size_t bytes, Stream stream, const char* what);
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceMemory();

  // Leaves the memory where it is for as long as the process lives.
  void keep() noexcept { data_ = nullptr; }

  size_t bytes() const noexcept { return bytes_; }
  bool empty() const noexcept { return data_ == nullptr; }
  template <class T = std::byte>
  T* as() const noexcept {
    return static_cast<T*>(data_);
  }

 private:
  DeviceAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace conclave::inline v0
