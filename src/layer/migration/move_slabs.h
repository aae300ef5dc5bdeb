// Copies the weights of experts between places of ranks: bytes of packed slabs, whatever they mean.
#pragma once

#include "layer/migration/pace.h"
#include "placement/moves.h"

#include "conclave/comm.h"
#include "conclave/weights.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace conclave::inline v0 {

class DeviceMover;

// The memory of a rank's places: each has a slab of every kind.
class PlaceMemory {
 public:
  struct Kind {
    std::span<std::byte* const> each = {};  // [places] slabs
    size_t bytes = 0;                       // each slab has them
    std::byte* temporary = nullptr;
  };
  explicit PlaceMemory(std::array<Kind, 2> kinds) : kinds_(kinds) {}

  std::array<std::span<std::byte>, 2> slabs(int32_t place) const;

 private:
  std::array<Kind, 2> kinds_;
};

// Writes an expert's slabs from a WeightSource.
using PackPlace =
    std::function<void(int32_t expert, std::span<std::byte> gate_up, std::span<std::byte> down)>;

struct MoveCall {
  std::span<const ExpertMove> moves;  // the same on every rank
  int32_t rank = 0;
  const PlaceMemory& from;  // where this rank's experts are
  const PlaceMemory& to;    // where those are to be that come; the same where a layer is
  Communicator* communicator = nullptr;  // null: this rank alone
  const PackPlace& pack;                 // empty: slabs travel from rank to rank
  size_t piece_bytes = 0;
  Pace& pace;
  const std::atomic<bool>& stopped;  // ends the copy between two pieces
  // Places lie in memory of a device, which this moves: instead of the memory and `pack` above, it
  // knows its own, and reads experts from the source, if there is one.
  DeviceMover* device = nullptr;
  const WeightSource* source = nullptr;
};

// The hashes of both ends of each move, as far as they are on this rank; 0 elsewhere.
struct MoveHashes {
  std::vector<uint64_t> sent;
  std::vector<uint64_t> received;
};

// Collective if slabs travel: every rank walks through the moves in order and takes part in its
// own, so that no two wait for each other. Throws CommError, what `pack` throws, and
// CommError(kCommAborted) when stopped.
MoveHashes move_slabs(const MoveCall& call);

}  // namespace conclave::inline v0
