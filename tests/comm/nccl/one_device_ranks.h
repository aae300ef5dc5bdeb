// Ranks of a test that are all on one device, each with a window in plain memory and a stream of
// its own: more of them than there are GPUs.
#pragma once

#include "comm/nccl/device_steps.h"
#include "comm/nccl/window_exchange.h"
#include "comm/nccl/window_layout.h"
#include "comm/one_launch.h"
#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace conclave::testing {

// Small, so that messages are long; blocks of all ranks must have room on the device at once.
inline constexpr int64_t kSmallSlot = int64_t{128} << 10;
inline constexpr int32_t kFewLaneBits = 5;

class RanksOnOneDevice {
  static size_t index(int32_t rank) { return static_cast<size_t>(rank); }

 public:
  explicit RanksOnOneDevice(int32_t count)
      : claims_(2 * sizeof(comm::DeviceClaim) * comm::kMaxClaims) {
    for (int32_t rank = 0; rank < count; ++rank) {
      windows_.emplace_back(static_cast<size_t>(comm::window_bytes(count, kSmallSlot)));
      counters_.emplace_back(sizeof(comm::MarkCounters));
      marks_.emplace_back(sizeof(comm::Marks));
      streams_.push_back(cuda::make_stream());
      addresses_.push_back(windows_.back().data());
      for (const cuda::DeviceBuffer* it : {&windows_.back(), &counters_.back(), &marks_.back()}) {
        cuda::check(cudaMemset(it->data(), 0, it->bytes()), "cudaMemset");
      }
    }
    for (int32_t rank = 0; rank < count; ++rank) {
      exchanges_.push_back(std::make_unique<comm::WindowExchange>(
          comm::WindowBlocks{
              .of_ranks = addresses_, .slot_bytes = kSmallSlot, .lane_bits = kFewLaneBits},
          rank,
          comm::WindowExchange::Claims{.out = claims_.as<comm::DeviceClaim>(),
                                       .in = claims_.as<comm::DeviceClaim>() + comm::kMaxClaims},
          &marks_[index(rank)].as<comm::Marks>()->stop));
    }
    cuda::check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
  }
  int32_t count() const { return static_cast<int32_t>(streams_.size()); }
  // The bytes of a pair's message.
  using Offered = std::function<int64_t(int32_t from, int32_t to)>;

  // Enqueues it on all ranks; nothing is allocated meanwhile, since kernels wait for each other.
  // Every rank says `code`, with the bytes that `offered` has for a pair.
  void run(const std::vector<CommOperation>& operations, const std::vector<uint32_t>& codes,
           const Offered& offered) const {
    run_all(static_cast<int32_t>(operations.size()), codes, offered,
            [&](int32_t rank, const comm::DeviceClaims& claims, const comm::MarkPlace& place) {
              exchanges_[index(rank)]->launch(operations[index(rank)], claims, place,
                                              streams_[index(rank)].get());
            });
  }
  void run(const std::vector<const comm::WindowKernel*>& kernels, const Offered& offered) const {
    const std::vector<uint32_t> codes(kernels.size(), 7);
    run_all(count(), codes, offered,
            [&](int32_t rank, const comm::DeviceClaims& claims, const comm::MarkPlace& place) {
              exchanges_[index(rank)]->launch(*kernels[index(rank)], claims, place,
                                              streams_[index(rank)].get());
            });
  }
  void run(const std::vector<CommOperation>& operations, const Offered& offered) const {
    run(operations, std::vector<uint32_t>(operations.size(), 7), offered);
  }
  void stop() const {
    const uint32_t word = 1;
    for (const cuda::DeviceBuffer& marks : marks_) {
      cuda::copy_to_device(std::as_bytes(std::span(&word, 1)), &marks.as<comm::Marks>()->stop);
    }
  }
  comm::Marks marks(int32_t rank) const {
    comm::Marks copy;
    cuda::copy_to_host(marks_[index(rank)].data(), std::as_writable_bytes(std::span(&copy, 1)));
    return copy;
  }
  void expect_marks(uint32_t operations) const {
    for (int32_t rank = 0; rank < count(); ++rank) {
      const comm::Marks found = marks(rank);
      EXPECT_EQ(found.begun[0], operations);
      EXPECT_EQ(found.ended[0], operations);
      EXPECT_EQ(found.collectives, operations);
      EXPECT_EQ(found.mismatches, 0U);
    }
  }

 private:
  template <class Launch>
  void run_all(int32_t present, const std::vector<uint32_t>& codes, const Offered& offered,
               const Launch& launch) const {
    for (int32_t rank = 0; rank < present; ++rank) {
      comm::DeviceClaims claims;
      for (int32_t peer = 0; peer < count(); ++peer) {
        if (peer == rank) continue;
        claims.list[index(claims.count++)] = {.code = codes[index(rank)],
                                              .peer = peer,
                                              .offered = offered(rank, peer),
                                              .expected = offered(peer, rank)};
      }
      launch(rank, claims,
             {.counters = counters_[index(rank)].as<comm::MarkCounters>(),
              .marks = marks_[index(rank)].as<comm::Marks>(),
              .cell = 0});
    }
    for (const cuda::OwnedStream& stream : streams_) {
      cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    }
  }

  cuda::DeviceBuffer claims_;
  std::vector<cuda::DeviceBuffer> windows_;
  std::vector<cuda::DeviceBuffer> counters_;
  std::vector<cuda::DeviceBuffer> marks_;
  std::vector<cuda::OwnedStream> streams_;
  std::vector<std::byte*> addresses_;
  std::vector<std::unique_ptr<comm::WindowExchange>> exchanges_;
};

}  // namespace conclave::testing
