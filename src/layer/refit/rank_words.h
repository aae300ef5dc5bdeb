// A word that each rank says before a step which all of them take: whether it goes on, and if not,
// why. So nobody waits for a rank that has given up.
#pragma once

#include "conclave/comm.h"
#include "conclave/error.h"

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

namespace conclave::inline v0 {

enum class RankIntent : int64_t {
  kGoesOn,
  kFails,      // not now; it may try again
  kWithdraws,  // its transaction is over
};

// Another rank has withdrawn: what it was part of ends on this one as well.
class RankWithdrawn final : public CommError {
 public:
  using CommError::CommError;
};

// Collective. Throws, where another rank does not go on, CommError(kCommMismatch) with its number
// and reason, RankWithdrawn if one withdraws. What this rank says itself throws nothing.
void exchange_words(RankIntent mine, std::string_view reason, Communicator& communicator,
                    const char* phase);

// Collective: throws `mine` on this rank, if it is set, else as exchange_words.
void agree_on_failure(const std::exception_ptr& mine, Communicator& communicator,
                      const char* phase);

// The text of an exception, for other ranks.
std::string reason_of(const std::exception_ptr& failure);

}  // namespace conclave::inline v0
