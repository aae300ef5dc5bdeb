// Memory whose end, or beginning, borders on an unmapped page: one access beyond it faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

namespace conclave::testing {

enum class GuardSide { kEnd, kBegin };

class GuardedBuffer {
 public:
  // With kEnd the buffer ends exactly at the unmapped page, so its beginning is aligned only as far
  // as `bytes` is a multiple of the alignment. It is filled with `poison`.
  GuardedBuffer(size_t bytes, GuardSide side, uint8_t poison = 0xa5) : bytes_(bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t body = (bytes + page - 1) / page * page;
    mapped_bytes_ = body + 2 * page;
    void* base = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(base);
    if (body != 0 && mprotect(base_ + page, body, PROT_READ | PROT_WRITE) != 0) {
      munmap(base_, mapped_bytes_);
      throw std::bad_alloc();
    }
    data_ = side == GuardSide::kBegin ? base_ + page : base_ + page + body - bytes;
    if (bytes != 0) std::memset(data_, poison, bytes);
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  GuardedBuffer(GuardedBuffer&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        data_(other.data_),
        bytes_(other.bytes_),
        mapped_bytes_(other.mapped_bytes_) {}
  GuardedBuffer& operator=(GuardedBuffer&&) = delete;
  ~GuardedBuffer() {
    if (base_ != nullptr) munmap(base_, mapped_bytes_);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }
  template <class T>
  T* as() const {
    return static_cast<T*>(static_cast<void*>(data_));
  }

 private:
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  size_t mapped_bytes_ = 0;
};

}  // namespace conclave::testing
