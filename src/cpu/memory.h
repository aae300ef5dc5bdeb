// Large aligned host memory for packed weights and workspaces.
#pragma once

#include "conclave/context.h"

#include <cstddef>
#include <memory>
#include <span>

namespace conclave::inline v0::cpu {

// The library's default: 64-byte aligned; blocks of 2 MiB and more are mapped on their own, aligned
// to 2 MiB and advised to use huge pages. Never returns null; throws std::bad_alloc instead.
HostAllocator& default_allocator();

// Owns one block from an allocator. Throws Error(kOutOfMemory) naming the bytes requested.
class Buffer {
 public:
  Buffer() = default;
  Buffer(HostAllocator& allocator, size_t bytes, size_t alignment = 64);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return bytes_; }
  std::span<std::byte> span() const noexcept { return {data_, bytes_}; }

 private:
  HostAllocator* allocator_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace conclave::inline v0::cpu
