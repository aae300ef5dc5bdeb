#include "layer/migration/move_slabs.h"

#include "layer/migration/slab_hash.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstring>

namespace conclave::inline v0 {
namespace {

constexpr const char* kCopyPhase = "migration: copy experts";

class Mover {
 public:
  explicit Mover(const MoveCall& call) : call_(call) {}

  void move(const ExpertMove& move, uint64_t& sent, uint64_t& received) {
    const bool sends = move.from_rank == call_.rank;
    const bool receives = move.to_rank == call_.rank;
    if (call_.pack) {
      if (receives) received = pack(move);
      if (sends) sent = hash(call_.from.slabs(move.from_place));
    } else if (sends && receives) {
      copy(move);
      sent = hash(call_.from.slabs(move.from_place));
      received = hash(call_.to.slabs(move.to_place));
    } else if (sends) {
      sent = send(move);
    } else if (receives) {
      received = receive(move);
    }
  }

 private:
  void between_pieces() {
    if (call_.stopped.load(std::memory_order_acquire)) {
      throw CommError(ErrorCode::kCommAborted, -1, kCopyPhase, "the migration was ended");
    }
    call_.pace.rest();
  }

  // Calls visit(offset, bytes) for each piece of a slab.
  template <class Visit>
  void for_each_piece(size_t bytes, const Visit& visit) {
    for (size_t at = 0; at < bytes; at += call_.piece_bytes) {
      visit(at, std::min(call_.piece_bytes, bytes - at));
      between_pieces();
    }
  }

  uint64_t pack(const ExpertMove& move) {
    const auto slabs = call_.to.slabs(move.to_place);
    // Bytes between the planes of a slab are zeros too, as they were when the layer was made.
    for (const auto& slab : slabs) std::memset(slab.data(), 0, slab.size());
    call_.pack(move.expert, slabs[0], slabs[1]);
    between_pieces();
    return hash(slabs);
  }

  uint64_t hash(const std::array<std::span<std::byte>, 2>& slabs) {
    SlabHash hash;
    for (const std::span<std::byte> slab : slabs) {
      for_each_piece(slab.size(),
                     [&](size_t at, size_t bytes) { hash.update(slab.subspan(at, bytes)); });
    }
    return hash.digest();
  }

  void copy(const ExpertMove& move) {
    const auto from = call_.from.slabs(move.from_place);
    const auto to = call_.to.slabs(move.to_place);
    for (size_t kind = 0; kind < from.size(); ++kind) {
      for_each_piece(from[kind].size(), [&](size_t at, size_t bytes) {
        std::memcpy(to[kind].data() + at, from[kind].data() + at, bytes);
      });
    }
  }

  uint64_t send(const ExpertMove& move) {
    SlabHash hash;
    for (const std::span<const std::byte> slab : call_.from.slabs(move.from_place)) {
      for_each_piece(slab.size(), [&](size_t at, size_t bytes) {
        const std::span<const std::byte> piece = slab.subspan(at, bytes);
        call_.communicator->send(move.to_rank, piece, kCopyPhase);
        hash.update(piece);
      });
    }
    return hash.digest();
  }

  uint64_t receive(const ExpertMove& move) {
    SlabHash hash;
    for (const std::span<std::byte> slab : call_.to.slabs(move.to_place)) {
      for_each_piece(slab.size(), [&](size_t at, size_t bytes) {
        const std::span<std::byte> piece = slab.subspan(at, bytes);
        call_.communicator->recv(move.from_rank, piece, kCopyPhase);
        hash.update(piece);
      });
    }
    return hash.digest();
  }

  const MoveCall& call_;
};

}  // namespace

std::array<std::span<std::byte>, 2> PlaceMemory::slabs(int32_t place) const {
  std::array<std::span<std::byte>, 2> slabs;
  for (size_t i = 0; i < kinds_.size(); ++i) {
    const Kind& kind = kinds_[i];
    const auto at = static_cast<size_t>(place);
    slabs[i] = {at < kind.each.size() ? kind.each[at] : kind.temporary, kind.bytes};
  }
  return slabs;
}

MoveHashes move_slabs(const MoveCall& call) {
  MoveHashes hashes{.sent = std::vector<uint64_t>(call.moves.size(), 0),
                    .received = std::vector<uint64_t>(call.moves.size(), 0)};
  Mover mover(call);
  for (size_t i = 0; i < call.moves.size(); ++i) {
    mover.move(call.moves[i], hashes.sent[i], hashes.received[i]);
  }
  return hashes;
}

}  // namespace conclave::inline v0
