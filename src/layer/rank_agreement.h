// Agreement between ranks before and during a collective forward.
#pragma once

#include "core/rank_counts.h"
#include "layer/agreed_values.h"
#include "layer/migration/epoch_switch.h"
#include "layer/plan.h"

#include "conclave/comm.h"

#include <cstdint>
#include <span>

namespace conclave::inline v0 {

// Collective over `communicator` if experts lie on several ranks, and over the plan's tensor
// communicator; does nothing if the caller reduces. Throws CommError(kCommMismatch) naming a rank
// and the first field that differs, on every rank, instead of a hang or a wrong result later.
// `own`: what the device's plan adds to spec, options and split.
void check_ranks_agree(const PlanBase& plan, std::span<const AgreedValue> own,
                       Communicator* communicator);

// Whether rows of several ranks meet at their experts in a forward.
bool exchanges_tokens(const PlanBase& plan);

// A rank brings these to a call.
struct CallOffer {
  int64_t tokens = 0;
  int64_t adapters = 0;                       // AdapterSet::key
  bool adapters_are_compared = true;          // that key was the same on all ranks before
  bool names_adapters = false;                // tokens of this rank may have one
  uint64_t refit_epoch = 0;                   // the weights that this rank has are of it
  int64_t expert_budget = 0;                  // every rank or none takes part in its exchange
  std::span<const int64_t> rank_tokens = {};  // ForwardArgs::rank_tokens
};
struct CallAgreement {
  int64_t chunks = 0;  // the largest number of all expert-parallel ranks: each takes part in all
  uint64_t epoch = 0;  // the placement epoch of the call
  RankCounts tokens;   // one for each rank, where rows gather on a device
  // Tokens of some expert-parallel rank may have an adapter.
  bool names_adapters = false;
};
// Tensor-parallel ranks must bring the same number of tokens. All ranks go to the next epoch once
// it is ready on each of them, between the same two calls. CommError(kCommMismatch) on each rank
// where numbers of tokens differ, or the lists of these that calls have, budgets, adapters, refits
// or epochs: here, or, where a forward only enqueues, from the sum over ranks. Ranks whose rows
// gather on devices tell each other their numbers of tokens and compare refits, unless the call has
// the numbers.
CallAgreement agree_on_call(const CallOffer& call, const EpochOffer& offer, const PlanBase& plan,
                            Communicator* communicator);
// Collective as above, where no rank has a source. `expert`: what this rank lacks, the number of
// experts if no weights that it holds serve, or -1. Throws Error(kTensorMissing) on every rank if
// one lacks something.
void check_nothing_is_missing(int64_t expert, const PlanBase& plan, Communicator* communicator);

// After an error in a forward: ends the exchanges that this rank has under way, so that no peer
// touches the workspace any more and none of either group waits for this rank. Does nothing where
// the communicator itself has failed, since peers know then.
void give_up(const PlanBase& plan, Communicator* communicator, const char* why);

}  // namespace conclave::inline v0
