// A rank's window: its peers store their bytes there, with a claim and flags that say which are in.
// Two epochs alternate, since a peer may be one operation ahead: it then fills the other half.
#pragma once

#include "comm/nccl/device_steps.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0::comm {

inline constexpr int32_t kMaxWindowRanks = 16;
// Blocks of threads of one operation, a power of 2: two communicators' have room on a device.
inline constexpr int32_t kLaneBits = 6;
inline constexpr int32_t kMaxLanes = 1 << kLaneBits;
inline constexpr uint32_t kEpochs = 2;

// The windows of all ranks, as one of them addresses them.
struct WindowBlocks {
  std::span<std::byte* const> of_ranks;
  // Messages of up to so many bytes have room in a window as a whole.
  int64_t slot_bytes = 0;
  int32_t lane_bits = kLaneBits;

  int32_t ranks() const { return static_cast<int32_t>(of_ranks.size()); }
};

// Lies in every rank's window at the same place, for each other rank. Flags are epochs; what counts
// the chunks of long messages has the epoch in its upper half.
struct WindowHead {
  uint32_t flags[kMaxWindowRanks][kMaxLanes];
  uint64_t arrived[kMaxWindowRanks][kMaxLanes];  // chunks that the other has sent
  uint64_t taken[kMaxWindowRanks][kMaxLanes];    // chunks that the other has no more need of
  DeviceClaim claims[kEpochs][kMaxWindowRanks];
};
inline constexpr int64_t kWindowHeadBytes = 65536;
static_assert(sizeof(WindowHead) <= kWindowHeadBytes);

// The place of `sender`'s bytes in the window of `receiver`, among those of all other ranks.
constexpr int64_t slot_offset(uint32_t epoch, int32_t sender, int32_t receiver, int32_t ranks,
                              int64_t slot_bytes) {
  const int64_t half = epoch % kEpochs;
  const int64_t place = sender < receiver ? sender : sender - 1;
  return kWindowHeadBytes + (half * (ranks - 1) + place) * slot_bytes;
}
constexpr int64_t window_bytes(int32_t ranks, int64_t slot_bytes) {
  return kWindowHeadBytes + int64_t{kEpochs} * (ranks - 1) * slot_bytes;
}

// An equal share of each lane, by whole units.
constexpr int64_t lane_bytes_of(int64_t bytes, int32_t lane_bits) {
  constexpr int64_t kUnit = 4096;
  const int64_t share = (bytes + (int64_t{1} << lane_bits) - 1) >> lane_bits;
  return (share + kUnit - 1) / kUnit * kUnit;
}
// A short message goes by stripes, one of each block of threads, and each has a flag. Its sender
// and its receiver cut it alike.
constexpr int64_t stripe_bytes_of(int64_t bytes, int32_t lane_bits) {
  constexpr int64_t kLeast = 8192;
  const int64_t share = lane_bytes_of(bytes, lane_bits);
  return share < kLeast ? kLeast : share;
}
// At least one: an empty message has a flag as well, which brings its claim.
constexpr int32_t stripes_of(int64_t bytes, int32_t lane_bits) {
  const int64_t stripe = stripe_bytes_of(bytes, lane_bits);
  return bytes == 0 ? 1 : static_cast<int32_t>((bytes + stripe - 1) / stripe);
}

// Messages that kernels of others' make are of units of any size, of which each block of threads
// has the same number; the last ones have fewer or none.
constexpr int64_t units_of_block(int64_t units, int32_t lane_bits) {
  constexpr int64_t kLeast = 8;
  const int64_t share = (units + (int64_t{1} << lane_bits) - 1) >> lane_bits;
  return share < kLeast ? kLeast : share;
}
constexpr int64_t blocks_of_units(int64_t units, int32_t lane_bits) {
  const int64_t share = units_of_block(units, lane_bits);
  return units == 0 ? 1 : (units + share - 1) / share;
}

// A long message goes by lanes, each by chunks that follow one another through its part of a slot.
inline constexpr int64_t kChunksInFlight = 2;
constexpr int64_t chunk_bytes_of(int64_t slot_bytes, int32_t lane_bits) {
  return (slot_bytes >> lane_bits) / kChunksInFlight;
}

}  // namespace conclave::inline v0::comm
