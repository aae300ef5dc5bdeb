#include "layer/cuda/pinned_memory.h"

#include "cuda/check.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <utility>

namespace conclave::inline v0 {
namespace {

// The allocator maps blocks of this size on pages of it, where the system has any.
constexpr size_t kHugePageBytes = size_t{2} << 20;

size_t whole_pages(size_t bytes) {
  return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

}  // namespace

PinnedMemory::PinnedMemory(size_t bytes) {
  cpu::Buffer memory(cpu::default_allocator(), whole_pages(bytes));
  // A child that had a copy of these pages would make the system give this process other ones,
  // which the device does not read.
  static_cast<void>(madvise(memory.data(), memory.size(), MADV_DONTFORK));
  cuda::check(cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterDefault),
              "cudaHostRegister");
  memory_ = std::move(memory);
}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  if (this == &other) return *this;
  release();
  memory_ = std::move(other.memory_);
  return *this;
}

void PinnedMemory::release() noexcept {
  if (memory_.data() != nullptr) static_cast<void>(cudaHostUnregister(memory_.data()));
  memory_ = {};
}

}  // namespace conclave::inline v0
