// Experts that move between the ranks of a layer while it lives: at once, between two forwards, or
// in the background of forwards. No bit of a result changes where rows come home unreduced (D3).
#pragma once

#include "conclave/balance.h"
#include "conclave/comm.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0 {

class MoeLayer;

struct MigrationOptions {
  // Connects the ranks of the context's communicator, in the same order, serves nothing else
  // meanwhile and outlives the migration. Migration needs one of its own; for update_placement null
  // is the context's.
  Communicator* communicator = nullptr;
  // If given, on every rank, experts are read and packed from it where they are to lie, instead of
  // sent; ranks that have them still send a hash. It is read on another thread than the caller's
  // and must outlive the migration. Null: slabs travel.
  const WeightSource* source = nullptr;
  // The part of a core's time that copies in the background may take on each rank, above 0; from 1
  // on they never rest. update_placement never rests.
  double processor_share = 0.05;
  size_t piece_bytes = size_t{256} << 10;  // one message of a slab, 4 KiB to 1 GiB
};

struct MigrationStatus {
  bool is_done = false;     // every expert is where it should be, and forwards use it
  bool has_failed = false;  // it will not go on; the layer stays in the epoch that it is in
  int64_t rounds = 0;       // epochs from the first placement to the last
  int64_t rounds_done = 0;
  int64_t experts_moved = 0;  // to and from any rank, so far
};

// Experts on their way to other places, copied by a thread of the migration's own into free places
// while the layer's forwards go on. When all ranks have a round's experts, the next forward of all
// of them uses these: it says so in the message by which ranks agree on a call anyway, and waits
// for nothing. Needs LayerOptions::spare_experts, or else replicas that give way.
// On CUDA planes travel from GPU to GPU where the communicator carries such memory. Calls that have
// rank_tokens, those that are captured and those of one rank stay in the epoch that they find, and
// finish() switches between two of them. Graphs read the places of now: replay them on the stream
// of the forwards, or under a GraphReplay. Results have D1: the bits of a layer made there.
// The context must outlive it; the layer's weights live as long as it does. One at a time for a
// layer and those that share its weights: until it is destroyed, the next one, update_placement and
// reload throw Error(kState). Calls from one thread at a time.
class CONCLAVE_API Migration {
 public:
  // On every rank of the layer, with the same slots and options, within the communicator's
  // deadline. Waits for no rank, and on CUDA once for the device. Throws Error: kInvalidArgument
  // naming the field, where the layer cannot have the slots; kUnsupported with the reason: experts
  // read in place, or with adapters, Reduce::kPartial, a circle of experts without a spare place;
  // kState if one is under way, or while a stream of the device is captured.
  Migration(MoeLayer& layer, const ExpertSlots& slots, const MigrationOptions& options);
  Migration(const Migration&) = delete;
  Migration& operator=(const Migration&) = delete;
  // Ends it where it is: before it is done, its communicator is aborted, so that peers need not
  // wait for their deadline. The layer stays in the epoch that it is in.
  ~Migration();

  MigrationStatus status() const;
  // Throws the error that ended it, if one did: CommError(kCommMismatch) where ranks disagree on
  // the request, kCommPeerLost, kCommTimeout and kCommAborted naming the rank and the phase,
  // or a copy differs; what the source threw. Waits for nothing.
  void check() const;
  // Waits until it is done. Collective over the layer's communicators, as a forward without tokens
  // would be. Throws as check, and CommError(kCommAborted) if it failed on another rank; on CUDA
  // it waits for the device, and is Error(kState) while a stream of it is captured.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0
