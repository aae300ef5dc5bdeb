// Ranks of "tcp" meet by what they tell each other, whatever else comes to their ports.
#include "support/thread_groups.h"
#include "support/thread_ranks.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <netinet/in.h>
#include <span>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Texts = std::vector<std::string>;

template <class Call>
void expect_error(ErrorCode code, const std::string& part, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected " << to_string(code);
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// The first of two ranks, whose peer says `theirs` in the last round, and what the first one says
// in those before.
void connect_to(const std::string& theirs, int rounds, std::chrono::nanoseconds timeout = 300ms) {
  int round = 0;
  connect("tcp", {.rank = 0,
                  .size = 2,
                  .exchange =
                      [&](const std::string& mine) {
                        return Texts{mine, ++round == rounds ? theirs : mine};
                      },
                  .timeout = timeout});
}

TEST(TcpMeeting, GroupOfOne_NeedsNoExchange) {
  for (const int32_t size : {0, 1}) {
    const auto alone = connect("tcp", {.rank = size - 1, .size = size});
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->rank(), 0);
    EXPECT_EQ(alone->name(), "tcp");
    alone->barrier("step");
    const std::vector<std::byte> mine(1 << 20, std::byte{7});
    std::vector<std::byte> all(mine.size());
    alone->all_gather(mine, all, "step");
    EXPECT_EQ(all, mine);
  }
}

TEST(TcpMeeting, RanksWithoutAWayToMeet_AreRefused) {
  expect_error(ErrorCode::kUnsupported, "exchange", [] { connect("tcp", {.rank = 0, .size = 2}); });
  expect_error(ErrorCode::kUnsupported, "launcher", [] { connect("tcp", {.group = 1}); });
  expect_error(ErrorCode::kUnsupported, "cuda:0", [] { connect("tcp", {.device = "cuda:0"}); });
  expect_error(ErrorCode::kUnsupported, "tcp", [] { launch_command("tcp", 2); });
}

TEST(TcpMeeting, TextsOfAnotherNumber_AreRefused) {
  expect_error(ErrorCode::kInvalidArgument, "exchange", [] {
    connect("tcp", {.rank = 0, .size = 3, .exchange = [](const std::string& mine) {
                      return Texts{mine, mine};
                    }});
  });
}

TEST(TcpMeeting, TextThatIsNoPlace_IsAMismatchNamingItsRank) {
  const std::string token(64, 'a');
  expect_error(ErrorCode::kCommMismatch, "rank 1", [] { connect_to("something else", 1); });
  for (const std::string& card :
       {std::string(), std::string(64, 'g') + " 80 127.0.0.1", token + " 0 127.0.0.1",
        token + " 70000 127.0.0.1", token + " -1 127.0.0.1", token + " 80",
        token + " 80x 127.0.0.1", std::string(63, 'a') + " 80 127.0.0.1",
        std::string(1 << 20, ' ')}) {
    SCOPED_TRACE(card.substr(0, 100));
    expect_error(ErrorCode::kCommMismatch, "rank 1", [&] { connect_to(card, 2); });
  }
}

TEST(TcpMeeting, RankThatDoesNotCome_IsATimeoutNamingIt) {
  // Whether its address leads nowhere, or is none.
  const std::string token(64, 'a');
  for (const std::string& card : {token + " 1 127.0.0.1", token + " 9 no-address"}) {
    const auto start = std::chrono::steady_clock::now();
    expect_error(ErrorCode::kCommTimeout, "rank 1", [&] { connect_to(card, 2); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  }
  // The second rank looks for the first.
  int round = 0;
  expect_error(ErrorCode::kCommTimeout, "rank 0", [&] {
    connect("tcp", {.rank = 1,
                    .size = 2,
                    .exchange =
                        [&](const std::string& mine) {
                          return Texts{++round == 2 ? token + " 1 127.0.0.1" : mine, mine};
                        },
                    .timeout = 300ms});
  });
}

TEST(TcpMeeting, ExchangeThatThrows_IsPassedOn) {
  class Own : public std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  EXPECT_THROW(connect("tcp", {.rank = 0,
                               .size = 2,
                               .exchange = [](const std::string&) -> Texts {
                                 throw Own("the store is gone");
                               }}),
               Own);
}

TEST(TcpMeeting, Bootstrap_TellsTheRanksWhereTheyAre) {
  auto before = make_local_group({.num_ranks = 3, .timeout = 20s});
  const auto outcomes =
      testing::run_ranks(std::move(before), [](int32_t rank, Communicator& communicator) {
        const auto group =
            connect("tcp", {.rank = rank, .size = 3, .bootstrap = &communicator, .timeout = 20s});
        const auto mine = static_cast<int64_t>(rank + 1);
        int64_t sum = 0;
        group->all_reduce(std::as_bytes(std::span(&mine, 1)),
                          std::as_writable_bytes(std::span(&sum, 1)), DType::kI64, ReduceOp::kSum,
                          "step");
        EXPECT_EQ(sum, 6);
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

// Connects to a port and says what no rank says.
void knock(uint16_t port, const std::string& words) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_storage storage{};
  std::memcpy(&storage, &address, sizeof address);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&storage), sizeof address) == 0) {
    ::send(fd, words.data(), words.size(), MSG_NOSIGNAL);
    if (words.size() % 2 == 0) std::this_thread::sleep_for(50ms);
  }
  ::close(fd);
}

TEST(TcpMeeting, Strangers_AreNotLetIn) {
  std::mutex mutex;
  Texts cards(3);
  std::atomic<int> places{0};
  std::atomic<int> told{0};
  std::vector<std::unique_ptr<Communicator>> group(3);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      int round = 0;
      const auto exchange = [&](const std::string& mine) {
        if (++round == 1) {
          ++places;
          while (places < 3) std::this_thread::sleep_for(1ms);
          return Texts(3, mine);
        }
        {
          const std::lock_guard lock(mutex);
          cards[static_cast<size_t>(rank)] = mine;
        }
        ++told;
        while (told < 3) std::this_thread::sleep_for(1ms);
        // Before any rank can be there.
        const std::string& card = cards[0];
        const auto port = static_cast<uint16_t>(std::stoi(card.substr(card.find(' '))));
        for (const size_t length : {0U, 1U, 40U, 63U, 4096U}) knock(port, std::string(length, 'x'));
        return cards;
      };
      group[static_cast<size_t>(rank)] =
          connect("tcp", {.rank = rank, .size = 3, .exchange = exchange, .timeout = 20s});
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto outcomes = testing::run_ranks(
      std::move(group), [](int32_t, Communicator& communicator) { communicator.barrier("step"); });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

TEST(TcpMeeting, MessagesOfMegabytes_ArriveBeforeTheSenderHasLeft) {
  // The sender's rank is destroyed while the receiver has not begun to read.
  auto group = testing::make_tcp_group({.num_ranks = 2, .timeout = 20s});
  const auto outcomes =
      testing::run_ranks(std::move(group), [](int32_t rank, Communicator& communicator) {
        constexpr size_t kBytes = 24 << 20;
        std::vector<std::byte> data(kBytes, std::byte{static_cast<unsigned char>(rank)});
        if (rank == 0) return communicator.send(1, data, "step");
        const CommHandle later = communicator.begin_recv(0, data);
        communicator.begin_barrier();  // something unread is left at the sender
        std::this_thread::sleep_for(200ms);
        communicator.wait(later, 20s, "step");
        EXPECT_EQ(data, std::vector<std::byte>(kBytes, std::byte{0}));
      });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

TEST(TcpMeeting, RankThatDoesNotRead_IsATimeoutNamingIt) {
  // What it has announced is more than the systems of both ranks hold.
  auto group = testing::make_tcp_group({.num_ranks = 2, .timeout = 20s});
  std::atomic<bool> over{false};
  const auto outcomes =
      testing::run_ranks(std::move(group), [&](int32_t rank, Communicator& communicator) {
        const std::vector<std::byte> mine(64 << 20);
        std::vector<std::byte> all(2 * mine.size());
        const CommHandle handle = communicator.begin_all_gather(mine, all);
        if (rank == 1) {
          while (!over) std::this_thread::sleep_for(1ms);
          return;
        }
        try {
          communicator.wait(handle, 500ms, "step");
        } catch (...) {
          over = true;
          throw;
        }
        over = true;
      });
  ASSERT_TRUE(outcomes[0].code.has_value());
  EXPECT_EQ(to_string(*outcomes[0].code), to_string(ErrorCode::kCommTimeout));
  EXPECT_EQ(outcomes[0].peer, 1);
}

TEST(TcpMeeting, AbortWhileBytesTravel_ReachesBothRanks) {
  for (int round = 0; round < 20; ++round) {
    auto group = testing::make_tcp_group({.num_ranks = 2, .timeout = 20s});
    Communicator& first = *group[0];
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(500 * round));
      first.abort("the operator said so");
    });
    // The rank is there until its abort has returned.
    std::atomic<bool> aborted{false};
    const auto outcomes =
        testing::run_ranks(std::move(group), [&](int32_t rank, Communicator& communicator) {
          const std::vector<std::byte> mine(2 << 20);
          std::vector<std::byte> all(2 * mine.size());
          try {
            while (true) communicator.all_gather(mine, all, "step");
          } catch (...) {
            if (rank == 0) {
              other.join();
              aborted = true;
            }
            throw;
          }
        });
    EXPECT_TRUE(aborted);
    for (const testing::RankOutcome& outcome : outcomes) {
      ASSERT_TRUE(outcome.code.has_value());
      EXPECT_EQ(to_string(*outcome.code), to_string(ErrorCode::kCommAborted)) << outcome.message;
    }
  }
}

TEST(TcpMeeting, ChildOfAFork_IsRefusedAndHarmsNobody) {
  auto group = testing::make_tcp_group({.num_ranks = 2, .timeout = 20s});
  // From now on each has a thread in the background, which the child has not.
  const std::vector<std::byte> mine(1 << 20);
  std::vector<std::byte> all(2 * mine.size());
  std::vector<std::byte> same(2 * mine.size());
  const auto gather = [&](Communicator& rank, std::vector<std::byte>& to) {
    return rank.begin(
        {.kind = CommKind::kAllGather, .send = mine, .recv = to, .in_background = true});
  };
  const CommHandle first = gather(*group[0], all);
  const CommHandle second = gather(*group[1], same);
  group[0]->wait(first, 20s, "gather");
  group[1]->wait(second, 20s, "gather");
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      group[0]->barrier("in the child");
    } catch (const Error& error) {
      status = error.code() == ErrorCode::kForked ? 0 : 2;
    }
    group[0]->abort("not the child's to say");
    group.clear();
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  const auto outcomes = testing::run_ranks(
      std::move(group), [](int32_t, Communicator& communicator) { communicator.barrier("step"); });
  EXPECT_EQ(testing::first_failure(outcomes), "");
}

}  // namespace
}  // namespace conclave
