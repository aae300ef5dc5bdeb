// Takes a layer from the ranks that it has to others, more or fewer, as a planned act: ranks that
// leave hand their experts over, ranks that join get theirs and all else from those that have them,
// and nothing of a checkpoint is read. The layer before stays as it is and serves until the
// application takes up the one after it. Where rows come home unreduced, no bit of a result changes
// (D3). After a failure, survivors() and MoeLayer::on_ranks go on without the ranks that are gone.
#pragma once

#include "conclave/balance.h"
#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/spec.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace conclave::inline v0 {

struct RegroupOptions {
  // Joins everyone concerned, in any order: ranks that stay, that leave and that join. It serves
  // nothing else meanwhile; so forwards of the layer before, on another thread, go on beside it.
  // With tensor-parallel ranks, those with the same slice. Required.
  Communicator* everyone = nullptr;
  // The split afterwards, as for MoeLayer::on_ranks; ranks that leave need none. By default the
  // ranks of the new context's communicator have the experts as spread_over deals them, in the
  // same slices. All give a split or none does.
  std::optional<ParallelSpec> parallel = std::nullopt;
  // Experts that none of the ranks has, as after a failure, are read from it where they are to lie.
  // Null: there are none, or it is an error.
  const WeightSource* source = nullptr;
  // The part of a core's time that copying may take on each rank, above 0; from 1 on it never
  // rests.
  double processor_share = 1;
  size_t piece_bytes = size_t{256} << 10;  // one message, 4 KiB to 1 GiB; equal on all ranks
};

// Three calls that meet: each rank of `everyone` makes the one that says what it does, at the same
// time. Either all of them return and every rank of the new group has its layer, or all throw and
// nothing has changed; only where a rank is lost at the very end may others have returned, and both
// layers are whole then too. Every wait ends within the deadline of its communicator.
//
// Experts that a rank keeps are not copied but shared with the layer before, as by on_ranks, and
// cost memory once; those that come are held from then on. Both ends hash what travels, and every
// rank compares. Until they return, reload, update_placement, Migration and regroup of the layer
// before throw Error(kState); forward does not wait. Adapters stay with it, counters begin anew.
//
// They throw Error: kInvalidArgument naming the field; kUnsupported with the reason: a layer on a
// GPU, weights read in place, Reduce::kPartial; kState while experts are on their way;
// kTensorMissing with an expert that nobody has; kOutOfMemory; what the source throws. CommError:
// kCommMismatch where ranks disagree on spec, options or request, or a copy differs; kCommAborted
// naming a rank that could not do its part; kCommPeerLost and kCommTimeout naming one that is lost
// or late. After a CommError of `everyone` neither that nor the new communicators are of use; the
// layer before is, with its own communicator.

// Stays: the layer on the new ranks, of which this is one. `context` has their communicators and
// must outlive the result; null communicators where this rank is left alone.
CONCLAVE_API MoeLayer regroup(const MoeLayer& layer, const Context& context,
                              const RegroupOptions& options);
// Leaves: this rank's experts go to those that stay. The layer may be destroyed afterwards.
CONCLAVE_API void hand_over(const MoeLayer& layer, const RegroupOptions& options);
// Joins with nothing. `spec` and `layer_options` are those that the layer was created with
// (MoeLayer::spec); Reduce::kFull.
CONCLAVE_API MoeLayer join_layer(const Context& context, const MoeSpec& spec,
                                 const LayerOptions& layer_options, const RegroupOptions& options);

// The slots of a layer on other ranks: rank r of them was rank old_ranks[r], or -1 joins with
// nothing. Every expert keeps as many replicas as it has, at most one on a rank; an expert that has
// none gets one place. Ranks hold equally many, or one more, and experts stay where they are as far
// as that allows; others fill the emptiest ranks. For loads that are known, balance_experts deals
// better. A pure function: equal arguments give equal slots. Throws Error(kInvalidArgument) naming
// the field: slots that are cut wrongly or have experts that do not exist; old_ranks that are
// empty, do not exist or are named twice.
CONCLAVE_API ExpertSlots spread_over(const ExpertSlots& before, std::span<const int32_t> old_ranks);

}  // namespace conclave::inline v0
