#include "support/thread_groups.h"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

namespace conclave::testing {
namespace {

// Each exchange of a rank is the next round.
class Board {
 public:
  explicit Board(int32_t ranks) : rounds_(kMost, std::vector<std::string>(size_t(ranks))) {
    counts_.resize(kMost);
  }

  std::vector<std::string> exchange(int32_t rank, size_t round, const std::string& mine) {
    std::unique_lock lock(mutex_);
    std::vector<std::string>& texts = rounds_.at(round);
    texts[static_cast<size_t>(rank)] = mine;
    ++counts_[round];
    all_are_here_.notify_all();
    all_are_here_.wait(lock, [&] { return counts_[round] == texts.size(); });
    return texts;
  }

 private:
  static constexpr size_t kMost = 8;
  std::mutex mutex_;
  std::condition_variable all_are_here_;
  std::vector<std::vector<std::string>> rounds_;
  std::vector<size_t> counts_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_tcp_group(const LocalGroupOptions& options) {
  // Meeting takes its time, however short the waits of the test are.
  Board board(options.num_ranks);
  std::vector<std::unique_ptr<Communicator>> group(static_cast<size_t>(options.num_ranks));
  std::vector<std::exception_ptr> errors(group.size());
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < options.num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      size_t round = 0;
      const auto exchange = [&](const std::string& mine) {
        return board.exchange(rank, round++, mine);
      };
      const auto at = static_cast<size_t>(rank);
      try {
        group[at] = connect("tcp", {.rank = rank,
                                    .size = options.num_ranks,
                                    .exchange = exchange,
                                    .timeout = options.timeout});
      } catch (...) {
        errors[at] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return group;
}

}  // namespace conclave::testing
