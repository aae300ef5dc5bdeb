// Roll calls: how ranks find out who is left after a failure, for every transport. A rank says that
// it is there and hears the same of others. When each has come or is known to have ended, or its
// deadline is over, it proposes those that it knows of; the first proposal holds for all, since the
// transport writes it where it is written once. So there is one answer, however late a rank is and
// whoever dies at which moment: nobody is asked twice, and nobody's answer is needed.
#pragma once

#include "conclave/comm.h"
#include "conclave/error.h"

#include <chrono>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

// Says of each rank whether it is among those that go on, 1 or 0.
using Present = std::vector<uint8_t>;

// One rank knows this of a roll call.
class RollCall {
 public:
  RollCall(int32_t me, int32_t ranks);
  void has_come(int32_t rank) { came_[static_cast<size_t>(rank)] = 1; }
  // It is known that the rank will not come, or come back.
  void has_ended(int32_t rank) { ended_[static_cast<size_t>(rank)] = 1; }

  bool is_over() const;
  // Those that have come and not ended; this rank is one of them.
  Present proposal() const;

 private:
  int32_t me_;
  Present came_;
  Present ended_;
};

std::vector<int32_t> ranks_of(std::span<const uint8_t> present);
// The index of `rank` among `survivors`. Throws CommError(kCommExcluded) if it is none of them.
int32_t rank_among(std::span<const int32_t> survivors, int32_t rank, std::string_view phase);
// Another roll call, of those that an earlier one has left: its ranks and errors are named as in
// the communicator that failed first. For ranks that are lost after their answer.
Survivors call_again(const Survivors& left, std::chrono::nanoseconds deadline,
                     std::string_view phase);
CommError known_as(std::span<const int32_t> old_ranks, const CommError& error);
// Throws Error(kState): a rank has one place among the survivors, and took it.
[[noreturn]] void refuse_second_roll_call();

}  // namespace conclave::inline v0::comm
