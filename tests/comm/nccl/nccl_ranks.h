// Ranks with a GPU each, connected by NCCL: threads over a local group. Where there is one GPU for
// two ranks, two processes of the same test may have it, which NCCL must take for two hosts:
//   CONCLAVE_TEST_NCCL=0:/tmp/meet NCCL_HOSTID=a NCCL_SOCKET_IFNAME=lo ... and 1:/tmp/meet, b
#pragma once

#include "comm/nccl/nccl_library.h"
#include "cuda/device_info.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace conclave::testing {

inline constexpr int32_t kNcclRanks = 2;

// The rank that this process is, and the folder where the processes meet; -1: ranks are threads.
struct OwnProcess {
  int32_t rank = -1;
  std::string folder;
};
inline OwnProcess own_process() {
  const char* const text = std::getenv("CONCLAVE_TEST_NCCL");
  if (text == nullptr || std::string(text).size() < 3) return {};
  return {.rank = text[0] - '0', .folder = std::string(text).substr(2)};
}

// Why this machine cannot run such tests; an empty text if it can.
inline std::string no_nccl_reason() {
  const cuda::DeviceCount devices = cuda::count_devices();
  const int32_t needed = own_process().rank >= 0 ? 1 : kNcclRanks;
  if (devices.count < needed) {
    return "needs " + std::to_string(needed) + " GPUs; there are " + std::to_string(devices.count) +
           (devices.reason.empty() ? "" : ": " + devices.reason);
  }
  const comm::NcclSearch found = comm::find_nccl();
  return found.support ? "" : found.support.reason();
}

class NcclTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = no_nccl_reason();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

// Writes a rank's text into the folder and reads those of all.
inline std::vector<std::string> exchange_by_files(const OwnProcess& own, const std::string& mine) {
  static int round = 0;
  const std::string place = own.folder + "/" + std::to_string(round++) + ".";
  const std::string own_place = place + std::to_string(own.rank);
  std::ofstream(own_place + ".new") << mine;
  std::filesystem::rename(own_place + ".new", own_place);
  std::vector<std::string> texts;
  for (int32_t rank = 0; rank < kNcclRanks; ++rank) {
    const std::string theirs = place + std::to_string(rank);
    for (int wait = 0; wait < 30000 && !std::filesystem::exists(theirs); ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ifstream file(theirs);
    texts.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return texts;
}

inline int32_t device_of(int32_t rank) { return own_process().rank >= 0 ? 0 : rank; }

// Calls body(rank, communicator) on each rank, with its device current.
template <class Body>
std::vector<RankOutcome> run_nccl_ranks(std::chrono::milliseconds timeout, const Body& body) {
  const OwnProcess own = own_process();
  const bool threads = own.rank < 0;
  auto group = make_local_group(
      {.num_ranks = threads ? kNcclRanks : 1, .timeout = std::chrono::seconds(60)});
  return run_ranks(std::move(group), [&](int32_t thread, Communicator& local) {
    const int32_t rank = threads ? thread : own.rank;
    const cuda::DeviceGuard guard(device_of(rank));
    ConnectOptions options{.rank = rank,
                           .size = kNcclRanks,
                           .device = "cuda:" + std::to_string(device_of(rank)),
                           .timeout = timeout};
    if (threads) options.bootstrap = &local;
    if (!threads) {
      options.exchange = [&](const std::string& mine) { return exchange_by_files(own, mine); };
    }
    const auto comm = connect("nccl", options);
    body(rank, *comm);
  });
}

// The same, where no body throws.
template <class Body>
void on_nccl_ranks(std::chrono::milliseconds timeout, const Body& body) {
  EXPECT_EQ(first_failure(run_nccl_ranks(timeout, body)), "");
}

// Whether all ranks have these bytes.
inline bool same_on_all(Communicator& comm, std::span<const std::byte> mine) {
  std::vector<std::byte> all(mine.size() * static_cast<size_t>(comm.size()));
  comm.all_gather(mine, all, "compare");
  for (size_t at = 0; at < all.size(); ++at) {
    if (all[at] != mine[at % mine.size()]) return false;
  }
  return true;
}

}  // namespace conclave::testing
