#include "cpu/memory.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace conclave::cpu {
namespace {

bool is_aligned(const void* data, size_t alignment) {
  return std::bit_cast<uintptr_t>(data) % alignment == 0;
}

constexpr size_t kHugePage = size_t{2} << 20;

TEST(DefaultAllocator, SmallAndLargeBlocks_AreAlignedAndWritable) {
  HostAllocator& allocator = default_allocator();
  for (const size_t bytes : {size_t{1}, size_t{63}, size_t{4097}, kHugePage - 1, kHugePage,
                             kHugePage + 1, 3 * kHugePage + 12345}) {
    auto* data = static_cast<std::byte*>(allocator.allocate(bytes, 64));
    ASSERT_NE(data, nullptr);
    EXPECT_TRUE(is_aligned(data, bytes >= kHugePage ? kHugePage : 64)) << bytes;
    std::memset(data, 0x5a, bytes);
    EXPECT_EQ(data[bytes - 1], std::byte{0x5a});
    allocator.deallocate(data, bytes);
  }
}

TEST(DefaultAllocator, LargerAlignment_IsKept) {
  HostAllocator& allocator = default_allocator();
  struct Case {
    size_t bytes, alignment;
  };
  for (const Case& c : {Case{100, 4096}, Case{1000, size_t{1} << 16},
                        Case{kHugePage, size_t{1} << 24}, Case{1, 1}}) {
    void* data = allocator.allocate(c.bytes, c.alignment);
    EXPECT_TRUE(is_aligned(data, c.alignment)) << c.bytes;
    EXPECT_TRUE(is_aligned(data, 64)) << "never below a cache line";
    allocator.deallocate(data, c.bytes);
  }
}

TEST(DefaultAllocator, ManyLargeBlocks_GoBackToTheSystem) {
  // The total is 64 GiB, which is only possible if each block is unmapped.
  for (int i = 0; i < 64; ++i) {
    void* data = default_allocator().allocate(size_t{1} << 30, 64);
    static_cast<std::byte*>(data)[0] = std::byte{1};
    default_allocator().deallocate(data, size_t{1} << 30);
  }
}

TEST(DefaultAllocator, AbsurdSizes_ThrowBadAlloc) {
  HostAllocator& allocator = default_allocator();
  for (const size_t bytes :
       {std::numeric_limits<size_t>::max(), std::numeric_limits<size_t>::max() - 4096,
        size_t{1} << 62, size_t{1} << 50}) {
    EXPECT_THROW(allocator.allocate(bytes, 64), std::bad_alloc) << bytes;
  }
  EXPECT_THROW(allocator.allocate(64, size_t{1} << 63), std::bad_alloc);
}

TEST(DefaultAllocator, NullDeallocation_DoesNothing) {
  default_allocator().deallocate(nullptr, 0);
  default_allocator().deallocate(nullptr, kHugePage);
}

class CountingAllocator final : public HostAllocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    if (fail_with_null) return nullptr;
    ++live;
    last_alignment = alignment;
    return default_allocator().allocate(bytes, alignment);
  }
  void deallocate(void* data, size_t bytes) noexcept override {
    --live;
    default_allocator().deallocate(data, bytes);
  }

  int live = 0;
  size_t last_alignment = 0;
  bool fail_with_null = false;
};

TEST(Buffer, Scope_ReturnsItsBlock) {
  CountingAllocator allocator;
  {
    const Buffer buffer(allocator, 1000, 128);
    EXPECT_EQ(allocator.live, 1);
    EXPECT_EQ(allocator.last_alignment, 128U);
    EXPECT_EQ(buffer.span().size(), 1000U);
  }
  EXPECT_EQ(allocator.live, 0);
}

TEST(Buffer, Move_TransfersOwnership) {
  CountingAllocator allocator;
  Buffer first(allocator, 10);
  std::byte* data = first.data();
  Buffer second(std::move(first));
  EXPECT_EQ(second.data(), data);
  Buffer third(allocator, 20);
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(third.size(), 10U);
  EXPECT_EQ(allocator.live, 1) << "the block of 20 went back";
}

TEST(Buffer, NoBytes_AllocatesNothing) {
  CountingAllocator allocator;
  const Buffer buffer(allocator, 0);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(allocator.live, 0);
}

TEST(Buffer, TooLarge_NamesBytesAskedAndAvailable) {
  constexpr size_t kBytes = size_t{1} << 50;
  try {
    const Buffer buffer(default_allocator(), kBytes);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_NE(error.detail().found.find(std::to_string(kBytes)), std::string::npos);
    EXPECT_NE(error.detail().limit.find("bytes available"), std::string::npos);
  }
}

TEST(Buffer, AllocatorThatReturnsNull_IsOutOfMemory) {
  CountingAllocator allocator;
  allocator.fail_with_null = true;
  try {
    const Buffer buffer(allocator, 8);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
}

}  // namespace
}  // namespace conclave::cpu
