// Device memory that frees itself. It is allocated at create, never in a forward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace conclave::inline v0::cuda {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Allocates on the current device, 256-byte aligned, not cleared. Throws Error(kOutOfMemory).
  explicit DeviceBuffer(size_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBuffer();

  std::byte* data() const noexcept { return data_; }
  size_t bytes() const noexcept { return bytes_; }
  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(static_cast<void*>(data_));
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Synchronous copies between host and device memory: for create, reload and tests.
void copy_to_device(std::span<const std::byte> source, void* destination);
void copy_to_host(const void* source, std::span<std::byte> destination);

template <class T>
void upload(std::span<const T> source, void* destination) {
  copy_to_device(std::as_bytes(source), destination);
}

}  // namespace conclave::inline v0::cuda
