#include "layer/cuda/device_memory.h"

#include "conclave/error.h"

#include <new>
#include <string>

namespace conclave::inline v0 {

DeviceMemory::DeviceMemory(DeviceAllocator& allocator, size_t bytes, Stream stream,
                           const char* what) {
  if (bytes == 0) return;
  constexpr size_t kAlignment = 256;
  try {
    data_ = allocator.allocate(bytes, kAlignment, stream);
  } catch (const std::bad_alloc&) {
    data_ = nullptr;
  }
  if (data_ == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, {.what = "no device memory for a layer",
                                          .tensor = what,
                                          .expected = std::to_string(bytes) + " bytes"});
  }
  allocator_ = &allocator;
  bytes_ = bytes;
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) allocator_->deallocate(data_, bytes_, {});
}

}  // namespace conclave::inline v0
