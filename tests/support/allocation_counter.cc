#include "support/allocation_counter.h"

#include "support/sanitizers.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <dlfcn.h>
#include <new>
#include <sys/mman.h>

namespace {

std::atomic<bool> armed{false};
std::atomic<int64_t> heap_count{0};
thread_local bool is_own_thread = false;
std::atomic<int64_t> own_heap_count{0};
std::atomic<int64_t> mapping_count{0};
std::atomic<int64_t> allocations_left{-1};
std::atomic<bool> has_failed{false};

void count_heap() {
  if (!armed.load(std::memory_order_relaxed)) return;
  heap_count.fetch_add(1, std::memory_order_relaxed);
  if (is_own_thread) own_heap_count.fetch_add(1, std::memory_order_relaxed);
}

bool must_fail() {
  if (allocations_left.load(std::memory_order_relaxed) < 0) return false;
  if (allocations_left.fetch_sub(1, std::memory_order_relaxed) != 0) return false;
  has_failed.store(true, std::memory_order_relaxed);
  return true;
}

void* allocate(size_t bytes, size_t alignment) {
  count_heap();
  if (must_fail()) return nullptr;
  if (bytes == 0) bytes = 1;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void* allocate_or_throw(size_t bytes, size_t alignment) {
  void* data = allocate(bytes, alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

// Every form of operator new is replaced; malloc itself is left to the sanitizers.
void* operator new(size_t bytes) { return allocate_or_throw(bytes, 0); }
void* operator new[](size_t bytes) { return allocate_or_throw(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, 0); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }
void operator delete[](void* data, size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, size_t, std::align_val_t) noexcept { std::free(data); }

#if !CONCLAVE_TEST_ASAN && !CONCLAVE_TEST_TSAN
// Without a sanitizer, C's allocator and mmap are counted too.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* data, size_t bytes);
void* malloc(size_t bytes) {
  count_heap();
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  count_heap();
  return __libc_calloc(count, bytes);
}
void* realloc(void* data, size_t bytes) {
  count_heap();
  return __libc_realloc(data, bytes);
}
void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  using Mmap = void* (*)(void*, size_t, int, int, int, off_t);
  static const Mmap next = reinterpret_cast<Mmap>(dlsym(RTLD_NEXT, "mmap"));
  if (armed.load(std::memory_order_relaxed)) mapping_count.fetch_add(1);
  return next(address, length, protection, flags, fd, offset);
}
}
#endif

namespace conclave::testing {

void arm_allocation_counter() {
  heap_count = 0;
  own_heap_count = 0;
  mapping_count = 0;
  is_own_thread = true;
  armed = true;
}

AllocationCounts disarm_allocation_counter() {
  armed = false;
  is_own_thread = false;
  return {.heap = heap_count, .own_heap = own_heap_count, .mappings = mapping_count};
}

void fail_heap_allocation(int64_t n) {
  has_failed = false;
  allocations_left = n;
}

bool heap_allocation_failed() { return has_failed; }

}  // namespace conclave::testing
