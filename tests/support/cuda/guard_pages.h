// Device memory that ends, or begins, at an address where nothing is mapped: a kernel that reads or
// writes one byte too far faults.
#pragma once

#include "conclave/context.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace conclave::testing {

enum class GuardSide : uint8_t { kEnd, kBegin };

// Each allocation has pages of its own and a hole on both sides. With kEnd it is as close to the
// hole as its alignment permits: pass sizes that are multiples of the alignment, or ask for less.
class GuardPageAllocator final : public DeviceAllocator {
 public:
  // Allocates on device 0.
  explicit GuardPageAllocator(GuardSide side) : side_(side) {}
  ~GuardPageAllocator() override;

  void* allocate(size_t bytes, size_t alignment, Stream stream) override;
  // Waits for the device.
  void deallocate(void* data, size_t bytes, Stream stream) noexcept override;

 private:
  struct Block {
    unsigned long long base = 0;  // start of the mapped pages
    size_t mapped = 0;
    size_t hole = 0;
    unsigned long long handle = 0;
  };
  void release(const Block& block) noexcept;

  GuardSide side_;
  std::mutex mutex_;
  std::map<void*, Block> blocks_;
};

}  // namespace conclave::testing
