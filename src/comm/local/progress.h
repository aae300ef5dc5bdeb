// Moves the bytes of operations that ranks have begun. Whoever comes last moves what all were
// waiting for, so that an operation completes while its ranks do other work; a rank that waits
// moves its own share meanwhile.
#pragma once

#include "comm/local/local_group.h"

#include <cstdint>
#include <mutex>

namespace conclave::inline v0::comm {

using GroupLock = std::unique_lock<std::mutex>;

// The operation of `peer` that belongs to `mine`, one of `rank`; null while there is none.
Operation* partner_of(LocalGroup& group, const Operation& mine, int32_t rank, int32_t peer);

// The same for comparison: also one whose rank has given up during it.
const Operation* counterpart_of(LocalGroup& group, const Operation& mine, int32_t rank,
                                int32_t peer);

// Moves what `mine`, an operation of `rank`, can take from its peers. Where ranks disagree nothing
// moves: the wait of each says why. True if anything moved. The lock is open while bytes move.
bool take(LocalGroup& group, Operation& mine, int32_t rank, GroupLock& lock);

// Moves what `mine` can take, and what its peers can take since it is there.
void move_all(LocalGroup& group, Operation& mine, int32_t rank, GroupLock& lock);

}  // namespace conclave::inline v0::comm
