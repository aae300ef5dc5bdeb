// What a communicator says it can do, and what it does where it cannot.
#include "comm/communicator.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;

void expect_unsupported(const std::string& reason, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), "kUnsupported") << error.what();
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
}

// An application's own communicator with as little as it may have: a group of one that finishes
// each operation at once, for messages and barriers only.
class Alone : public Communicator {
 public:
  std::string_view name() const noexcept override { return "alone"; }
  int32_t rank() const noexcept override { return 0; }
  int32_t size() const noexcept override { return 1; }
  std::chrono::nanoseconds timeout() const noexcept override { return 1s; }
  void wait(CommHandle, std::chrono::nanoseconds, std::string_view) override {}
  bool test(CommHandle, std::string_view) override { return true; }
  void abort(std::string_view) noexcept override {}

  std::vector<CommOperation> started;

 protected:
  CommHandle start(const CommOperation& operation) override {
    started.push_back(operation);
    return {started.size()};
  }
};

// The same, with memory of a device, streams and windows.
class OnDevice final : public Alone {
 public:
  Support supports(CommFeature feature) const override {
    if (feature == CommFeature::kHostMemory) return Support::no("it carries device memory only");
    return Support::yes();
  }
  void wait_on(Stream stream, CommHandle handle, std::chrono::nanoseconds,
               std::string_view) override {
    followers.emplace_back(stream, handle.sequence);
  }
  std::unique_ptr<PeerWindow> open_window(size_t bytes, MemoryKind, std::chrono::nanoseconds,
                                          std::string_view) override {
    class Window final : public PeerWindow {
     public:
      explicit Window(size_t bytes) : memory_(bytes) {}
      size_t bytes() const noexcept override { return memory_.size(); }
      std::byte* block(int32_t) const noexcept override { return memory_.data(); }

     private:
      mutable std::vector<std::byte> memory_;
    };
    return std::make_unique<Window>(bytes);
  }

  std::vector<std::pair<Stream, uint64_t>> followers;
};

TEST(CommFeatures, ByDefault_OnlyHostMemoryIsThere) {
  const Alone comm;
  EXPECT_TRUE(comm.supports(CommFeature::kHostMemory));
  for (const CommFeature feature : {CommFeature::kDeviceMemory, CommFeature::kStreamOrder,
                                    CommFeature::kOverlap, CommFeature::kPeerMemory}) {
    const Support support = comm.supports(feature);
    EXPECT_FALSE(support);
    EXPECT_NE(support.reason().find("alone cannot "), std::string::npos) << support.reason();
  }
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kI32, DType::kI64}) {
    EXPECT_TRUE(comm.supports_reduction(dtype, ReduceOp::kSum));
    EXPECT_TRUE(comm.supports_reduction(dtype, ReduceOp::kMax));
  }
  EXPECT_NE(comm.supports_reduction(DType::kBF16, ReduceOp::kSum).reason().find("BF16"),
            std::string::npos);
}

TEST(CommFeatures, WhatIsNotThere_IsRefusedWithItsReason) {
  Alone comm;
  int marker = 0;
  const Stream stream{&marker};
  std::vector<std::byte> data(8);
  std::vector<std::byte> other(8);
  const ConstByteView on_device(std::span<const std::byte>(data), MemoryKind::kDevice);
  expect_unsupported("memory of a device", [&] { comm.begin_send(0, on_device); });
  expect_unsupported("memory of a device", [&] {
    comm.begin_all_gather(data, {std::span<std::byte>(other), MemoryKind::kDevice});
  });
  expect_unsupported("memory of a device", [&] {
    const std::vector<int64_t> one = {8};
    const std::vector<int64_t> at = {0};
    comm.begin_all_to_all_v({data.data(), one, at, other.data(), one, at, MemoryKind::kDevice});
  });
  expect_unsupported("by a stream", [&] { comm.begin_barrier(stream); });
  expect_unsupported("by a stream", [&] { comm.wait_on(stream, {1}, 1s, "step"); });
  expect_unsupported("memory of its peers",
                     [&] { comm.open_window(64, MemoryKind::kDevice, 1s, "step"); });
  EXPECT_TRUE(comm.started.empty());
  comm.check("nothing has failed");
}

TEST(CommFeatures, EmptyBuffers_NeedNoMemory) {
  OnDevice comm;
  comm.begin_barrier();
  comm.begin_all_gather({}, {});
  EXPECT_EQ(comm.started.size(), 2U);
}

TEST(CommFeatures, OperationsWithAStream_ReachTheTransportAsTheyAre) {
  OnDevice comm;
  int marker = 0;
  const Stream stream{&marker};
  std::vector<std::byte> data(8);
  std::vector<std::byte> other(8);
  const ConstByteView from(std::span<const std::byte>(data), MemoryKind::kDevice);
  const ByteView to(std::span<std::byte>(other), MemoryKind::kDevice);
  const CommHandle handle = comm.begin_all_reduce(from, to, DType::kF32, ReduceOp::kMax, stream);
  ASSERT_EQ(comm.started.size(), 1U);
  const CommOperation& started = comm.started.front();
  EXPECT_EQ(to_string(started.kind), "all_reduce");
  EXPECT_EQ(started.send.data(), data.data());
  EXPECT_EQ(started.recv.data(), other.data());
  EXPECT_EQ(started.recv.memory, MemoryKind::kDevice);
  EXPECT_EQ(started.dtype, DType::kF32);
  EXPECT_EQ(started.reduce, ReduceOp::kMax);
  EXPECT_EQ(started.stream, stream);
  comm.wait_on(stream, handle, 1s, "step");
  EXPECT_EQ(comm.followers.front(), std::pair(stream, handle.sequence));
  expect_unsupported("device memory only", [&] { comm.begin_send(0, data); });

  const auto window = comm.open_window(256, MemoryKind::kDevice, 1s, "step");
  EXPECT_EQ(window->bytes(), 256U);
  EXPECT_NE(window->block(0), nullptr);
}

TEST(CommFeatures, UnknownOperation_IsRefused) {
  Alone comm;
  EXPECT_THROW(comm.begin({.kind = static_cast<CommKind>(99)}), Error);
  EXPECT_EQ(to_string(static_cast<CommKind>(99)), "unknown");
}

TEST(CommFeatures, Local_OverlapsAndKeepsItsMemory) {
  const auto group = make_local_group({.num_ranks = 2});
  EXPECT_TRUE(group[0]->supports(CommFeature::kHostMemory));
  EXPECT_TRUE(group[0]->supports(CommFeature::kOverlap));
  EXPECT_FALSE(group[0]->supports(CommFeature::kDeviceMemory));
  EXPECT_FALSE(group[0]->supports(CommFeature::kStreamOrder));
  expect_unsupported("to themselves",
                     [&] { group[0]->open_window(64, MemoryKind::kHost, 1s, "step"); });
}

TEST(Connect, EveryUsableTransport_ConnectsAGroupOfOne) {
  const std::vector<TransportInfo> infos = transports();
  ASSERT_FALSE(infos.empty());
  for (const TransportInfo& info : infos) {
    SCOPED_TRACE(info.name);
    EXPECT_FALSE(info.reason.empty());
    if (!info.usable) continue;
    for (const ConnectOptions& options :
         {ConnectOptions{.timeout = 7s}, ConnectOptions{.rank = 0, .size = 1, .timeout = 7s}}) {
      const auto comm = connect(info.name, options);
      EXPECT_EQ(comm->name(), info.name);
      EXPECT_EQ(comm->rank(), 0);
      EXPECT_EQ(comm->size(), 1);
      EXPECT_EQ(comm->timeout(), 7s);
      comm->barrier("alone");
      const std::vector<std::byte> mine(3, std::byte{5});
      std::vector<std::byte> all(3);
      comm->all_gather(mine, all, "alone");
      EXPECT_EQ(all, mine);
    }
  }
}

TEST(Connect, TransportsAreThoseOfTheCatalog) {
  const std::vector<TransportInfo> infos = transports();
  const auto rows = comm::communicator_catalog().rows();
  ASSERT_EQ(infos.size(), rows.size());
  for (size_t i = 0; i < infos.size(); ++i) {
    EXPECT_EQ(infos[i].name, rows[i].name);
    EXPECT_EQ(infos[i].meets_by_exchange, rows[i].meets_by_exchange);
    EXPECT_EQ(infos[i].device_kind, rows[i].device_kind);
  }
}

// Two ranks that are threads, with texts in memory.
int count_connected(const std::string& transport) {
  std::barrier meet(2);
  std::vector<std::string> texts(2);
  std::atomic<int> connected{0};
  const auto join = [&](int32_t rank) {
    const auto exchange = [&, rank](const std::string& mine) {
      texts[static_cast<size_t>(rank)] = mine;
      meet.arrive_and_wait();
      std::vector<std::string> all = texts;
      meet.arrive_and_wait();
      return all;
    };
    const auto comm =
        connect(transport, {.rank = rank, .size = 2, .exchange = exchange, .timeout = 10s});
    comm->barrier("connected");
    ++connected;
  };
  std::thread other([&] { join(1); });
  join(0);
  other.join();
  return connected;
}

// The tool starts their ranks itself.
TEST(Connect, TransportsThatMeetByExchange_NeedNoMore) {
  int seen = 0;
  for (const TransportInfo& info : transports()) {
    SCOPED_TRACE(info.name);
    EXPECT_FALSE(info.meets_by_exchange && !info.launch_variables.empty());
    if (!info.usable || !info.meets_by_exchange || !info.device_kind.empty()) continue;
    EXPECT_EQ(count_connected(info.name), 2);
    ++seen;
  }
  EXPECT_GT(seen, 0);
}

TEST(Connect, BadOptions_AreRefused) {
  const auto code = [](std::string_view transport, const ConnectOptions& options) {
    try {
      connect(transport, options);
    } catch (const Error& error) {
      return std::string(to_string(error.code()));
    }
    return std::string("accepted");
  };
  EXPECT_EQ(code("carrier pigeon", {}), "kUnknownName");
  EXPECT_EQ(code("local", {.rank = 1, .size = 1}), "kInvalidArgument");
  EXPECT_EQ(code("local", {.rank = -1, .size = 1}), "kInvalidArgument");
  EXPECT_EQ(code("local", {.rank = 0, .size = 0}), "kInvalidArgument");
  EXPECT_EQ(code("local", {.rank = 0, .size = -2}), "kInvalidArgument");
  const auto group = make_local_group({.num_ranks = 2});
  EXPECT_EQ(code("local", {.rank = 0, .size = 1, .bootstrap = group[1].get()}), "kInvalidArgument");
  EXPECT_EQ(code("local", {.device = "cuda:0"}), "kUnsupported");
  expect_unsupported("make_local_group", [] { connect("local", {.rank = 0, .size = 2}); });
}

}  // namespace
}  // namespace conclave
