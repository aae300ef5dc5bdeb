// A rank that a test has started (launch.h): how it joins its group.
#pragma once

#include "conclave/comm.h"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <sched.h>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave::testing {

// Written whole or not at all: the one who reads waits for it.
inline void write_whole(const std::string& path, const std::string& text) {
  { std::ofstream(path + ".new") << text << "\n"; }
  std::rename((path + ".new").c_str(), path.c_str());
}

// The texts of all ranks, by files of a directory.
class FileExchange {
 public:
  FileExchange(std::string directory, int32_t rank, int32_t ranks)
      : directory_(std::move(directory)), rank_(rank), ranks_(ranks) {}

  std::vector<std::string> operator()(const std::string& mine) {
    const std::string round = directory_ + "/text." + std::to_string(round_++) + ".";
    write_whole(round + std::to_string(rank_), mine);
    std::vector<std::string> texts;
    for (int32_t rank = 0; rank < ranks_; ++rank) texts.push_back(read(round, rank));
    return texts;
  }

 private:
  static std::string read(const std::string& round, int32_t rank) {
    for (int tries = 0; tries < 20'000; ++tries) {
      std::ifstream file(round + std::to_string(rank));
      std::string text;
      if (std::getline(file, text)) return text;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw std::runtime_error("rank " + std::to_string(rank) + " has not come");
  }

  std::string directory_;
  int32_t rank_;
  int32_t ranks_;
  int round_ = 0;
};

inline std::unique_ptr<Communicator> join_group(const std::string& transport,
                                                const std::string& directory,
                                                std::chrono::nanoseconds timeout) {
  if (transport == "mpi") return connect("mpi", {.timeout = timeout});
  const int32_t rank = std::atoi(std::getenv("CONCLAVE_TEST_RANK"));
  const int32_t ranks = std::atoi(std::getenv("CONCLAVE_TEST_RANKS"));
  // Programs of a busy machine begin one long after the other, which is no fault of theirs.
  const auto first = connect(transport, {.rank = rank,
                                         .size = ranks,
                                         .exchange = FileExchange(directory, rank, ranks),
                                         .timeout = std::chrono::seconds(60)});
  return connect(transport,
                 {.rank = rank, .size = ranks, .bootstrap = first.get(), .timeout = timeout});
}

// Gives this process a host name of its own, by which the library takes it for one of another host:
// then ranks share no memory and do not look into /proc. False where that is not allowed.
inline bool move_to_host(const std::string& name) {
  if (::unshare(CLONE_NEWUTS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWUTS) != 0) return false;
  return ::sethostname(name.c_str(), name.size()) == 0;
}

}  // namespace conclave::testing
