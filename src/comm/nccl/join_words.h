// While NCCL connects ranks it waits for each without a word, also for one that has died. Here each
// says that it is through, or has given up, so that the others see meanwhile who is lost.
#pragma once

#include "conclave/comm.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace conclave::inline v0::comm {

enum class JoinWord : uint8_t { kIsThrough = 1, kHasGivenUp };

// Serves one joining. Where nobody has met, the messages of `host`, which outlives this, are to be
// ended first.
class JoinWords {
 public:
  // Collective over `host`.
  explicit JoinWords(Communicator& host);
  JoinWords(const JoinWords&) = delete;
  JoinWords& operator=(const JoinWords&) = delete;

  // Waits for nothing. Throws CommError for a rank that is lost.
  void look();
  // Says this rank's word and hears all others. Throws CommError naming a rank that is lost, silent
  // until the deadline, or has given up.
  void meet(JoinWord mine, std::chrono::nanoseconds deadline);

 private:
  std::span<std::byte> word_of(size_t rank) { return std::span(words_).subspan(rank, 1); }
  template <class Body>
  void for_each_peer(const Body& body);

  Communicator& host_;
  std::vector<std::byte> words_;
  std::vector<CommHandle> heard_;
};

}  // namespace conclave::inline v0::comm
