// Weights that one rank has and sends to the others of a communicator, for layers that change
// theirs together.
#pragma once

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/refit.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace conclave::inline v0 {

struct BroadcastOptions {
  int32_t root = 0;  // the rank that has the weights, the same on every rank
  // Says what the root sends, as refits do; both lists empty: all that its source has. Experts
  // bring all of their tensors. Steps of rows (WeightPlane::kInputScale) come of all experts.
  RefitScope part = {};
  // The memory in which a rank keeps what it receives. None: that of the context's device, if the
  // communicator carries it, or the host's.
  std::optional<MemoryKind> memory = {};
  // So many bytes go at a time, the same on every rank: one chunk is read while the one before
  // travels. A rank that does not keep them where they arrive needs room for two meanwhile.
  int64_t exchange_bytes = int64_t{64} << 20;
};

// The weights of the root, on every rank: whole tensors of which each layer takes its part. Where
// context and communicator are of a GPU, bytes travel through its memory, and rows of a source in
// host memory are uploaded by the context's threads. What is received is kept until this is
// destroyed, by the root as well if it has uploaded it and has room; else the root reads its own
// source. So a large layer is best filled part by part.
//
// A source for create, reload and refits; Refit::stage_broadcast is this and its stage in one,
// where ranks that give up are heard. Reading it is not collective.
class CONCLAVE_API BroadcastWeights final : public WeightSource {
 public:
  // Collective over `communicator`, on which nothing else is under way; returns when the weights
  // are there. `source` is the root's, others give null. It must outlive this. Throws what the
  // source throws and Error(kInvalidArgument) for a part that it does not have, on the root, or
  // kOutOfMemory where it is lacking; CommError(kCommMismatch) naming that rank with its reason on
  // the others, and for roots that differ; other CommError as any collective. No rank has the
  // weights then. A source in device memory needs a view of every matrix: Error(kDevice).
  BroadcastWeights(const Context& context, Communicator& communicator, const WeightSource* source,
                   const BroadcastOptions& options = {});
  BroadcastWeights(BroadcastWeights&&) noexcept;
  BroadcastWeights& operator=(BroadcastWeights&&) noexcept;
  ~BroadcastWeights() override;

  // Tensors that were not sent have a count of 0.
  WeightInfo describe(WeightId id) const override;
  // Throws Error(kTensorMissing) for an expert that was not sent.
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override;
  ConstTensorView view(WeightId id, int64_t expert) const override;
  MemoryKind memory() const override;
  std::string locate(WeightId id, int64_t expert) const override;
  void check_unchanged() const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0
