#include "cpu/memory.h"

#include "cpu/fresh_memory.h"
#include "cpu/numa.h"
#include "cpu/topology.h"

#include "conclave/error.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>
#include <sys/mman.h>
#include <utility>

namespace conclave::inline v0::cpu {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kPageBytes = 4096;
constexpr size_t kMinAlignment = 64;
// Linux promises more memory than there is and kills the process when pages are touched, so blocks
// of at least this size are compared with what is free. For smaller ones the look-up would cost
// more than it saves.
constexpr size_t kCheckedBytes = size_t{64} << 20;

size_t mapped_bytes(size_t bytes) { return (bytes + kPageBytes - 1) & ~(kPageBytes - 1); }

class PagedAllocator final : public HostAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    alignment = std::max(std::bit_ceil(alignment), kMinAlignment);
    constexpr auto kLargest = static_cast<size_t>(std::numeric_limits<ptrdiff_t>::max() / 2);
    if (bytes > kLargest || alignment > kLargest) throw std::bad_alloc();
    return bytes < kHugePageBytes ? allocate_small(bytes, alignment)
                                  : allocate_large(bytes, std::max(alignment, kHugePageBytes));
  }

  void deallocate(void* data, size_t bytes) noexcept override {
    if (data == nullptr) return;
    if (bytes < kHugePageBytes) {
      std::free(data);
    } else {
      munmap(data, mapped_bytes(bytes));
    }
  }

 private:
  static void* allocate_small(size_t bytes, size_t alignment) {
    void* data = nullptr;
    if (posix_memalign(&data, alignment, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
    return data;
  }

  void* allocate_large(size_t bytes, size_t alignment) const {
    if (bytes >= kCheckedBytes) {
      const int64_t available = read_memory_size("/").available_bytes;
      if (available > 0 && bytes > static_cast<size_t>(available)) throw std::bad_alloc();
    }
    const size_t length = mapped_bytes(bytes);
    std::byte* data = map_aligned(length, alignment);
    // This is only advice: without huge pages the block is slower, not wrong.
    madvise(data, length, MADV_HUGEPAGE);
    apply_interleave(interleave_, data, length);
    return data;
  }

  // Maps enough to hold an aligned block wherever the kernel puts it, and returns the rest.
  static std::byte* map_aligned(size_t length, size_t alignment) {
    const size_t reserved = length + alignment;
    void* mapped =
        mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    auto* base = static_cast<std::byte*>(mapped);
    const auto address = std::bit_cast<uintptr_t>(base);
    const size_t before = (alignment - address % alignment) % alignment;
    const size_t after = reserved - before - length;
    if (before != 0) munmap(base, before);
    if (after != 0) munmap(base + before + length, after);
    return base + before;
  }

  const InterleavePlan interleave_ = plan_interleave(read_numa_nodes("/"));
};

[[noreturn]] void throw_out_of_memory(size_t bytes) {
  const int64_t available = read_memory_size("/").available_bytes;
  throw Error(ErrorCode::kOutOfMemory,
              {.what = "cannot allocate " + std::to_string(bytes) + " bytes of host memory",
               .found = std::to_string(bytes) + " bytes asked for",
               .limit = std::to_string(available) + " bytes available"});
}

std::byte* allocate_or_throw(HostAllocator& allocator, size_t bytes, size_t alignment) {
  void* data = nullptr;
  try {
    data = allocator.allocate(bytes, alignment);
  } catch (const std::bad_alloc&) {
    throw_out_of_memory(bytes);
  }
  if (data == nullptr) throw_out_of_memory(bytes);
  return static_cast<std::byte*>(data);
}

}  // namespace

HostAllocator& default_allocator() {
  static PagedAllocator allocator;
  return allocator;
}

bool gives_zeros(const HostAllocator& allocator, size_t bytes) {
  return &allocator == &default_allocator() && bytes >= kHugePageBytes;
}

Buffer::Buffer(HostAllocator& allocator, size_t bytes, size_t alignment) : allocator_(&allocator) {
  if (bytes == 0) return;
  data_ = allocate_or_throw(allocator, bytes, alignment);
  bytes_ = bytes;
}

Buffer::Buffer(Buffer&& other) noexcept
    : allocator_(std::exchange(other.allocator_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  Buffer moved(std::move(other));
  std::swap(allocator_, moved.allocator_);
  std::swap(data_, moved.data_);
  std::swap(bytes_, moved.bytes_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) allocator_->deallocate(data_, bytes_);
}

}  // namespace conclave::inline v0::cpu
