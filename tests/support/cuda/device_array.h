// Device memory for tests: filled from vectors, poisoned if it will be written, guarded at its end.
#pragma once

#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::testing {

// Skips with the driver's reason if there is no device.
class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const cuda::DeviceCount devices = cuda::count_devices();
    if (devices.count == 0) GTEST_SKIP() << devices.reason;
    stream_ = cuda::make_stream();
  }
  cudaStream_t stream() const { return stream_.get(); }
  void wait() const { cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize"); }

 private:
  cuda::OwnedStream stream_;
};

inline constexpr uint8_t kPoison = 0xab;
inline constexpr size_t kGuardBytes = 4096;

// `count` poisoned elements, followed by a guard that nobody may write.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count), buffer_(bytes() + kGuardBytes) {
    const std::vector<std::byte> poison(buffer_.bytes(), std::byte{kPoison});
    cuda::copy_to_device(poison, buffer_.data());
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    cuda::upload(std::span<const T>(values), buffer_.data());
  }

  T* data() const { return buffer_.template as<T>(); }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }

  std::vector<T> download() const { return download(data(), count_); }
  static std::vector<T> download(const T* from, size_t count) {
    std::vector<T> values(count);
    cuda::copy_to_host(from, std::as_writable_bytes(std::span<T>(values)));
    return values;
  }
  void expect_guard_untouched() const {
    const auto guard =
        DeviceArray<uint8_t>::download(buffer_.template as<uint8_t>() + bytes(), kGuardBytes);
    for (size_t i = 0; i < guard.size(); ++i) ASSERT_EQ(guard[i], kPoison) << "guard byte " << i;
  }

 private:
  size_t count_ = 0;
  cuda::DeviceBuffer buffer_;
};

// Null for an empty vector, which stands for an argument that a call leaves out.
template <class T>
T* or_null(const DeviceArray<T>& array) {
  return array.size() == 0 ? nullptr : array.data();
}

}  // namespace conclave::testing
