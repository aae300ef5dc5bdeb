// What is special to ranks that are processes of MPI: their groups, an application's own
// communicator, and messages longer than an int counts.
#include "support/sanitizers.h"

#include "conclave/comm.h"
#include "conclave/error.h"
#include "conclave/interop/mpi.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

std::string code_of(const auto& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(to_string(error.code()));
  }
  return "accepted";
}

TEST(MpiCommunicator, Groups_HaveTheRanksOfTheirNumber) {
  const auto all = connect("mpi");
  const int32_t group = all->rank() % 2;
  const auto mine = connect("mpi", {.group = group, .timeout = 30s});
  EXPECT_EQ(mine->rank(), all->rank() / 2);
  EXPECT_EQ(mine->size(), (all->size() + 1 - group) / 2);
  const int32_t number = all->rank();
  std::vector<int32_t> numbers(static_cast<size_t>(mine->size()));
  mine->all_gather(std::as_bytes(std::span(&number, 1)), std::as_writable_bytes(std::span(numbers)),
                   "numbers");
  for (size_t i = 0; i < numbers.size(); ++i) {
    EXPECT_EQ(numbers[i], static_cast<int32_t>(i) * 2 + group);
  }
}

TEST(MpiCommunicator, RankThatTheLauncherDidNotGive_IsRefused) {
  const auto all = connect("mpi");
  EXPECT_EQ(all->name(), "mpi");
  EXPECT_EQ(code_of([&] {
              connect("mpi", {.rank = all->rank(), .size = all->size() + 1, .timeout = 30s});
            }),
            "kInvalidArgument");
  EXPECT_EQ(code_of([] { connect("mpi", {.device = "cuda:0"}); }), "kUnsupported");
  const auto same = connect("mpi", {.rank = all->rank(), .size = all->size(), .timeout = 7s});
  EXPECT_EQ(same->timeout(), 7s);
}

int64_t resident_bytes() {
  int64_t pages = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

// Buffers of a group that was left are given back with its communicator: each has up to 2 MiB for
// every peer.
TEST(MpiCommunicator, ManyRollCalls_KeepNoMemory) {
  if (CONCLAVE_TEST_ASAN || CONCLAVE_TEST_TSAN) GTEST_SKIP() << "sanitizers keep freed memory";
  const auto first = connect("mpi", {.timeout = 60s});
  const std::vector<std::byte> mine(1 << 20, std::byte{1});
  std::vector<std::byte> all(mine.size() * static_cast<size_t>(first->size()));
  std::unique_ptr<Communicator> current;
  int64_t begin = 0;
  constexpr int kRounds = 40;
  for (int round = 0; round < kRounds; ++round) {
    if (round == 5) begin = resident_bytes();
    Communicator& group = current ? *current : *first;
    group.all_gather(mine, all, "round");
    Survivors left = survivors(group);
    ASSERT_EQ(left.communicator->size(), first->size());
    current = std::move(left.communicator);
  }
  EXPECT_LT(resident_bytes() - begin, int64_t{12} << 20);
}

TEST(MpiCommunicator, Features_SayWhatIsMissing) {
  const auto all = connect("mpi");
  EXPECT_TRUE(all->supports(CommFeature::kHostMemory));
  EXPECT_TRUE(all->supports(CommFeature::kOverlap));
  EXPECT_FALSE(all->supports(CommFeature::kDeviceMemory));
  for (const TransportInfo& info : transports()) {
    if (info.name != "mpi") continue;
    EXPECT_TRUE(info.usable);
    EXPECT_NE(info.reason.find("MPI_THREAD_"), std::string::npos) << info.reason;
    EXPECT_FALSE(info.launch_variables.empty());
  }
}

TEST(MpiCommunicator, CommunicatorOfAnApplication_IsCopied) {
  EXPECT_EQ(code_of([] { make_mpi_communicator(MPI_COMM_NULL); }), "kNullPointer");
  const auto first = connect("mpi");  // initialises MPI
  MPI_Comm reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -first->rank(), &reversed);
  const auto mine = make_mpi_communicator(reversed, 20s);
  MPI_Comm_free(&reversed);
  EXPECT_EQ(mine->rank(), mine->size() - 1 - first->rank());
  EXPECT_EQ(mine->timeout(), 20s);
  mine->barrier("meet");
}

// Two communicators of one rank do not take each other's messages.
TEST(MpiCommunicator, OperationsOfTwoGroups_StayApart) {
  const auto a = connect("mpi");
  const auto b = connect("mpi");
  const int32_t one = 1;
  const int32_t ten = 10;
  int32_t ones = 0;
  int32_t tens = 0;
  const auto begin = [](Communicator& comm, const int32_t& value, int32_t& sum) {
    return comm.begin_all_reduce(std::as_bytes(std::span(&value, 1)),
                                 std::as_writable_bytes(std::span(&sum, 1)), DType::kI32,
                                 ReduceOp::kSum);
  };
  const bool even = a->rank() % 2 == 0;
  const CommHandle first = even ? begin(*a, one, ones) : begin(*b, ten, tens);
  const CommHandle second = even ? begin(*b, ten, tens) : begin(*a, one, ones);
  (even ? a : b)->wait(first, 30s, "first");
  (even ? b : a)->wait(second, 30s, "second");
  EXPECT_EQ(ones, a->size());
  EXPECT_EQ(tens, a->size() * 10);
}

// One mebibyte, mapped again and again: long in addresses, short in memory.
class RepeatedMemory {
 public:
  RepeatedMemory(int64_t bytes, std::byte fill) : bytes_(bytes) {
    const int file = ::memfd_create("repeated", MFD_CLOEXEC);
    EXPECT_EQ(::ftruncate(file, kPeriod), 0);
    base_ = static_cast<std::byte*>(::mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (int64_t at = 0; at < bytes; at += kPeriod) {
      ::mmap(base_ + at, static_cast<size_t>(std::min(kPeriod, bytes - at)), PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED, file, 0);
    }
    ::close(file);
    std::fill_n(base_, kPeriod, fill);
  }
  RepeatedMemory(const RepeatedMemory&) = delete;
  RepeatedMemory& operator=(const RepeatedMemory&) = delete;
  ~RepeatedMemory() { ::munmap(base_, static_cast<size_t>(bytes_)); }

  std::span<std::byte> bytes() const { return {base_, static_cast<size_t>(bytes_)}; }

 private:
  static constexpr int64_t kPeriod = int64_t{1} << 20;
  int64_t bytes_;
  std::byte* base_ = nullptr;
};

TEST(MpiCommunicator, MessageLongerThanAnIntCounts_ArrivesWhole) {
  const auto all = connect("mpi", {.timeout = 120s});
  if (all->size() != 2) GTEST_SKIP() << "two ranks show it";
  constexpr int64_t kBytes = (int64_t{1} << 31) + 4097;
  const RepeatedMemory memory(kBytes, all->rank() == 0 ? std::byte{7} : std::byte{0});
  const std::span<std::byte> bytes = memory.bytes();
  if (all->rank() == 0) {
    bytes[4096] = std::byte{9};  // the last byte, among others
    all->send(1, bytes, "long");
  } else {
    all->recv(0, bytes, "long");
    EXPECT_EQ(bytes[0], std::byte{7});
    EXPECT_EQ(bytes[4096], std::byte{9});
    EXPECT_EQ(std::count(bytes.begin(), bytes.begin() + (1 << 20), std::byte{7}), (1 << 20) - 1);
  }
}

}  // namespace
}  // namespace conclave
