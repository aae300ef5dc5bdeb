#include "conclave/device_queue.h"

#include "layer/engine.h"

#include "conclave/error.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr size_t kTensorAlignment = 256;

size_t checked_bytes(const ConstTensorView& tensor) {
  if (tensor.row_stride == 0) return dense_bytes(tensor.dtype, tensor.shape);
  throw Error(ErrorCode::kStride, {.what = "only dense tensors are copied",
                                   .expected = "row_stride 0",
                                   .found = std::to_string(tensor.row_stride)});
}

size_t same_bytes(const ConstTensorView& from, const ConstTensorView& to) {
  const size_t bytes = checked_bytes(from);
  if (bytes == checked_bytes(to)) return bytes;
  throw Error(ErrorCode::kShape, {.what = "a copy between tensors of different sizes",
                                  .expected = from.shape.to_string(),
                                  .found = to.shape.to_string()});
}

}  // namespace

DeviceTensor::DeviceTensor(DeviceTensor&& other) noexcept { *this = std::move(other); }

DeviceTensor& DeviceTensor::operator=(DeviceTensor&& other) noexcept {
  std::swap(allocator_, other.allocator_);
  std::swap(data_, other.data_);
  std::swap(dtype_, other.dtype_);
  std::swap(shape_, other.shape_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

DeviceTensor::~DeviceTensor() {
  if (allocator_ != nullptr) allocator_->deallocate(data_, std::max<size_t>(size_bytes_, 1), {});
}

struct DeviceQueue::Impl {
  const DeviceRuntime* runtime = nullptr;
  DeviceAllocator* allocator = nullptr;
  Stream stream;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (stream.handle != nullptr) runtime->destroy_stream(stream);
  }
};

DeviceQueue::DeviceQueue(const Context& context) : impl_(std::make_unique<Impl>()) {
  impl_->runtime = device_runtime(context);
  if (impl_->runtime == nullptr) {
    throw Error(ErrorCode::kUnsupported, {.what = "this device has no queues",
                                          .found = context.device(),
                                          .hint = "ContextOptions.device names one"});
  }
  impl_->allocator = context.device_allocator();
  impl_->stream = impl_->runtime->make_stream();
}

DeviceQueue::DeviceQueue(DeviceQueue&&) noexcept = default;
DeviceQueue& DeviceQueue::operator=(DeviceQueue&&) noexcept = default;
DeviceQueue::~DeviceQueue() = default;

Stream DeviceQueue::stream() const noexcept { return impl_->stream; }

DeviceTensor DeviceQueue::allocate(DType dtype, const Shape& shape) const {
  DeviceTensor tensor;
  tensor.size_bytes_ = dense_bytes(dtype, shape);
  tensor.dtype_ = dtype;
  tensor.shape_ = shape;
  const size_t bytes = std::max<size_t>(tensor.size_bytes_, 1);
  try {
    tensor.data_ = impl_->allocator->allocate(bytes, kTensorAlignment, impl_->stream);
  } catch (const std::bad_alloc&) {
    tensor.data_ = nullptr;
  }
  if (tensor.data_ == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, {.what = "no device memory for a tensor",
                                          .expected = std::to_string(bytes) + " bytes"});
  }
  tensor.allocator_ = impl_->allocator;
  return tensor;
}

DeviceTensor DeviceQueue::upload(const ConstTensorView& from) const {
  DeviceTensor tensor = allocate(from.dtype, from.shape);
  upload(from, tensor.view());
  return tensor;
}

void DeviceQueue::upload(const ConstTensorView& from, const TensorView& to) const {
  impl_->runtime->copy_to_device(from.data, to.data, same_bytes(from, to), impl_->stream);
  synchronize();
}

void DeviceQueue::download(const ConstTensorView& from, const TensorView& to) const {
  impl_->runtime->copy_to_host(from.data, to.data, same_bytes(from, to), impl_->stream);
  synchronize();
}

void DeviceQueue::fill(const TensorView& tensor, uint8_t value) const {
  impl_->runtime->fill(tensor.data, value, checked_bytes(tensor), impl_->stream);
}

void DeviceQueue::synchronize() const { impl_->runtime->synchronize(impl_->stream); }

double DeviceQueue::time_ms(const std::function<void()>& enqueue, int32_t replays) const {
  return impl_->runtime->time_replays(impl_->stream, enqueue, replays);
}

}  // namespace conclave::inline v0
