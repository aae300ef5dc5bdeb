// Memory that forwards may still read or write stays where it is while a capture lets nobody wait
// for them. Needs no GPU: the host's memory stands for a device's.
#include "cuda/device_wait.h"
#include "layer/cuda/adapter_memory.h"
#include "support/cuda/host_memory.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

namespace conclave {
namespace {

using testing::set_captured;

class CountedMemory final : public DeviceAllocator {
 public:
  ~CountedMemory() override {
    for (void* data : held_) std::free(data);
  }
  void* allocate(size_t bytes, size_t alignment, Stream) override {
    held_.push_back(std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment));
    return held_.back();
  }
  void deallocate(void*, size_t, Stream) noexcept override { ++given_back; }

  int given_back = 0;

 private:
  std::vector<void*> held_;
};

TEST(CapturedDevice, NobodyWaits) {
  set_captured(true);
  EXPECT_FALSE(cuda::wait_for_device());
  EXPECT_FALSE(cuda::has_ended(0));
  set_captured(false);
  EXPECT_TRUE(cuda::wait_for_device());
  EXPECT_TRUE(cuda::has_ended(0));
}

TEST(CapturedDevice, MemoryOfAdapters_IsGivenBackOnlyWhereItWasWaitedFor) {
  CountedMemory memory;
  { const AdapterMemory adapters(memory, 0, 4096, {}); }
  EXPECT_EQ(memory.given_back, 1);
  set_captured(true);
  { const AdapterMemory adapters(memory, 0, 4096, {}); }
  set_captured(false);
  EXPECT_EQ(memory.given_back, 1);
}

}  // namespace
}  // namespace conclave
