// The few device services that a program needs to run a layer without the device's own library: a
// stream, copies, memory, timing. Applications with a framework use the framework's.
#pragma once

#include "conclave/context.h"
#include "conclave/tensor.h"
#include "conclave/version.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace conclave::inline v0 {

class DeviceQueue;

// Owns memory of a device, from the context's allocator. Move only. The memory is freed without a
// stream: synchronise the work that uses it first.
class CONCLAVE_API DeviceTensor {
 public:
  DeviceTensor() = default;
  DeviceTensor(DeviceTensor&& other) noexcept;
  DeviceTensor& operator=(DeviceTensor&& other) noexcept;
  ~DeviceTensor();

  TensorView view() noexcept { return {data_, dtype_, shape_, 0}; }
  ConstTensorView view() const noexcept { return {data_, dtype_, shape_, 0}; }
  ConstTensorView const_view() const noexcept { return view(); }
  size_t size_bytes() const noexcept { return size_bytes_; }
  template <class T>
  T* as() noexcept {
    return static_cast<T*>(data_);
  }

 private:
  friend class DeviceQueue;
  DeviceAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  Shape shape_;
  size_t size_bytes_ = 0;
};

// A stream of the context's device. The context and its allocator must outlive queue and tensors;
// tensors may outlive their queue. One queue serves one thread at a time. All calls throw
// Error(kDevice) if the device fails, also for work enqueued earlier.
class CONCLAVE_API DeviceQueue {
 public:
  // Throws Error(kUnsupported) for a context on "cpu".
  explicit DeviceQueue(const Context& context);
  DeviceQueue(DeviceQueue&&) noexcept;
  DeviceQueue& operator=(DeviceQueue&&) noexcept;
  ~DeviceQueue();  // waits

  Stream stream() const noexcept;
  // Memory for a tensor of that type and shape, at least one byte, not cleared. Throws
  // Error(kOutOfMemory, kSizeOverflow).
  DeviceTensor allocate(DType dtype, const Shape& shape) const;
  // Copy dense tensors and wait until done. `to` has the size of `from`: Error(kShape).
  DeviceTensor upload(const ConstTensorView& from) const;
  void upload(const ConstTensorView& from, const TensorView& to) const;
  void download(const ConstTensorView& from, const TensorView& to) const;
  // Enqueues a write of `value` to every byte.
  void fill(const TensorView& tensor, uint8_t value) const;
  void synchronize() const;

  // Mean milliseconds of the work that `enqueue` puts on stream(): captured into a graph, replayed
  // once untimed, then `replays` times in a row. Throws what `enqueue` throws.
  double time_ms(const std::function<void()>& enqueue, int32_t replays) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0
