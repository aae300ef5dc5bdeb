// Bytes that ranks send, which both ends can make.
#pragma once

#include "cuda/memory.h"

#include "conclave/comm.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace conclave::testing {

using Bytes = std::vector<std::byte>;

// Whole numbers and floats of every kind of value, the same on every machine.
template <class T>
inline Bytes values(int64_t count, uint64_t seed) {
  Bytes bytes(static_cast<size_t>(count) * sizeof(T));
  uint64_t state = seed * 0x9E3779B97F4A7C15U + 12345;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto value =
        static_cast<T>(static_cast<double>(static_cast<int64_t>(state >> 20)) * 0x1p-24 - 4e5);
    std::memcpy(bytes.data() + static_cast<size_t>(i) * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

inline Bytes letters(int64_t count, int32_t from, int32_t to) {
  Bytes bytes(static_cast<size_t>(count));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] =
        static_cast<std::byte>((i * 7 + static_cast<size_t>(from * 31 + to * 17) + i / 251) % 255);
  }
  return bytes;
}

// Device memory with a host's bytes, at any offset from an aligned address.
class OnDevice {
 public:
  explicit OnDevice(const Bytes& bytes, size_t offset = 0)
      : buffer_(bytes.size() + offset + 1), offset_(offset), size_(bytes.size()) {
    cuda::copy_to_device(bytes, data());
  }
  std::byte* data() const { return buffer_.data() + offset_; }
  ConstByteView read() const {
    return {std::span<const std::byte>(data(), size_), MemoryKind::kDevice};
  }
  ByteView write() const { return {std::span<std::byte>(data(), size_), MemoryKind::kDevice}; }
  Bytes bytes() const {
    Bytes copy(size_);
    cuda::copy_to_host(data(), copy);
    return copy;
  }

 private:
  cuda::DeviceBuffer buffer_;
  size_t offset_;
  size_t size_;
};

}  // namespace conclave::testing
