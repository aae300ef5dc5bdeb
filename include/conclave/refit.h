// Refit: new weights for a layer that serves, as a transaction. A forward sees the old weights or
// the new ones, never a mixture; what fails leaves the old ones.
#pragma once

#include "conclave/context.h"
#include "conclave/stream.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

class Communicator;
class MoeLayer;
struct BroadcastOptions;  // conclave/broadcast_weights.h

// The weights that change; both empty: all. `tensors` alone: these of all experts; `experts` alone:
// everything of these routed experts; both: of the routed tensors those of these experts, of other
// tensors all. Tensors that are packed together change together: gate and up of an expert with all
// of their planes, down with its own. Naming one of them reads all of them from the source.
struct RefitScope {
  std::vector<int32_t> experts = {};   // routed experts, in [0, E)
  std::vector<WeightId> tensors = {};  // any plane of the matrices; weights of the layer itself
};

// The tensor of that name, for RefitScope: "down", "shared_up_scale", "router". Those of
// ExpertWeights are names too: "gate_up" is up, with which gate changes. Throws
// Error(kInvalidArgument).
CONCLAVE_API WeightId refit_tensor(std::string_view name);

enum class RefitMode : uint8_t {
  kStaged,      // packed beside the old ones while forwards run; commit hands the memory over, so
                // that experts that were named have new addresses. Others keep theirs, unless more
                // than a quarter of the memory changes: then all of it is new. On a GPU: as next
  kStagedCopy,  // packed beside too, and commit copies it over the old ones: addresses stay, and
                // forwards wait for the copy, on a GPU in the order of their streams
  kInPlace,     // packed over the old ones: addresses stay, no expert is held twice, and forward
                // throws Error(kState) from the first stage to commit
};

// Other ranks hear this where a refit is refused as it begins.
enum class RefitRefusal : uint8_t {
  kWithdraws,  // as Refit::withdraw(layer) says it, before the constructor throws
  kSilent,     // nothing: for a rank whose other threads run forwards at that time. It calls
               // Refit::withdraw(layer) itself, where the others commit
};

struct RefitOptions {
  RefitMode mode = RefitMode::kStaged;
  RefitScope scope = {};
  // The number that the layer has after commit, larger than the one it has: a trainer's step. 0:
  // one more. Ranks must name the same.
  uint64_t epoch = 0;
  // The threads that pack. Null: the calling thread alone, so that forwards keep the context's,
  // or on a GPU the context's. Forwards that use this executor too wait for all that a stage packs.
  Executor* executor = nullptr;
  // Keeps the memory that a staged refit has packed into or replaced for the next one of all
  // experts, which then takes none from the system: twice the weights until a refit without it.
  bool keeps_memory = false;
  // The ranks of stage_broadcast, if there are other ones than those that share the layer: they
  // hear of a rank that gives up before it has come to its first one. Null: none, or those of the
  // first stage_broadcast. Must outlive the Refit.
  Communicator* communicator = nullptr;
  RefitRefusal refusal = RefitRefusal::kWithdraws;
};

// A source for stage over the caller's memory: any tensor may be left out, and those of routed
// experts hold `experts` alone, in this order; none named: all `num_experts` of the layer. Steps of
// rows may hold all of them. The views' memory must outlive the source. Throws as
// make_pointer_source, Error(kInvalidArgument) for an expert that the layer lacks or that comes
// twice, Error(kShape) for a tensor of another number of experts.
CONCLAVE_API std::unique_ptr<WeightSource> make_part_source(const ExpertWeights& weights,
                                                            int64_t num_experts,
                                                            std::span<const int32_t> experts = {});

// One transaction of a layer and of those that share its weights (with_max_tokens); begun by the
// constructor, ended by commit, rollback or the destructor. The context must outlive it. Calls from
// one thread at a time, concurrent with forwards of other threads. Until it ends, another refit,
// reload, update_placement and Migration throw Error(kState).
class CONCLAVE_API Refit {
 public:
  // Throws Error: kInvalidArgument for an expert or tensor that the layer does not have, or an
  // epoch that is not larger; kUnsupported with the reason: a part of experts that are read in
  // place (WeightUse), or on a GPU any of them unless kInPlace, and there half an expert whose
  // columns have an order; kState if a migration or refit is under way, or if the layer has no
  // complete weights and the scope is not all of them; kOutOfMemory. Where ranks share the layer it
  // withdraws first, unless RefitRefusal::kSilent: whoever is refused waits for the others' commit.
  explicit Refit(MoeLayer& layer, const RefitOptions& options = {});
  Refit(const Refit&) = delete;
  Refit& operator=(const Refit&) = delete;
  // Rolls back unless it is committed.
  ~Refit();

  // Reads and packs the whole scope, or a part of it, so that weights may come in several pieces;
  // what is staged again replaces what was. The source is read within the call, unless experts are
  // read in place, and needs no more than what is named, except that steps of rows
  // (WeightPlane::kInputScale) are read of all experts. Shapes, types and values are checked as by
  // create, of all that is named before any of it is packed, but for what MoeSpec.quant says is
  // known of codes and scales, which packing finds. Throws as create does for a source,
  // what the source throws, and Error(kInvalidArgument) for a part outside the scope. Then the
  // transaction goes on, and what failed may be staged again. Afterwards kInPlace has overwritten
  // some weights, unless a check threw.
  void stage(const WeightSource& source);
  void stage(const WeightSource& source, const RefitScope& part);

  // Stages what rank options.root of `communicator` has, as BroadcastWeights sends it: all ranks of
  // it call, the others than the root with null. An empty options.part is the refit's scope. From
  // the first call on these ranks take part in commit and withdraw as those that share the layer
  // do, so that all of them have the new weights or none. Throws what BroadcastWeights and stage
  // throw, after which the transaction goes on; where another rank has withdrawn,
  // CommError(kCommMismatch) with it as its peer and the reason, and then this transaction is
  // over, too. Error(kInvalidArgument) for another communicator than before, which it tells the
  // others as refuse_broadcast does.
  void stage_broadcast(Communicator& communicator, const WeightSource* source,
                       const BroadcastOptions& options);
  // In the place of stage_broadcast, for a rank that has no weights to send, or no use for them:
  // the others' throws CommError(kCommMismatch) with this rank as its peer and the reason, of which
  // some 240 bytes arrive. All transactions go on. Waits for the others, no longer than the
  // communicator's deadline.
  void refuse_broadcast(Communicator& communicator, std::string_view reason) noexcept;

  // Makes the staged weights the layer's between two forwards: waits for those under way, keeps
  // new ones waiting meanwhile; the exchange itself allocates nothing. Where ranks share a layer it
  // is collective over the layer's communicators, as a forward is, with the same scope on every
  // rank; all of them go to the new epoch or none does. A rank whose stage failed calls it as well:
  // the others learn of it and throw CommError(kCommMismatch). Ranks with Reduce::kPartial act
  // alone. Throws Error(kState) naming a part of the scope that is not staged, CommError. The
  // transaction goes on then.
  //
  // On a GPU forwards that were enqueued before have the old weights and those enqueued later the
  // new ones, on any stream; forwards of other threads are enqueued meanwhile. It first waits for
  // all that the device has been given, so that replays of graphs enqueued before the call have the
  // old weights, and returns when the new ones lie in place, so that those enqueued later have
  // them. Replays by other threads meanwhile need a GraphReplay. Throws Error(kState) while a
  // stream of the device is captured, which ends that capture; Error(kDevice) if the device fails,
  // after which the layer may have no complete weights.
  void commit();

  // Ends it with the old weights. Of kInPlace, once it has overwritten something, the layer has no
  // complete weights: forward throws Error(kState) until all of them are reloaded or refitted.
  // Other ranks are not told: their commit ends with the communicator's deadline.
  void rollback() noexcept;

  // Rolls back and tells the other ranks, in the place of commit or stage_broadcast and collective
  // as these are: theirs throws CommError(kCommMismatch) with this rank as its peer and the reason,
  // of which some 240 bytes arrive, as soon as all have come, and they keep their old weights too.
  // Waits for them, no longer than the communicator's deadline; one that does not come is no error
  // here. Nothing once the transaction has ended.
  void withdraw() noexcept;
  void withdraw(std::string_view reason) noexcept;
  // The same for a rank that has no transaction, where the others have one: it was refused, or its
  // weights could not be found. Collective as commit is; one's own transaction is left as it is.
  // `communicator` is that of RefitOptions, or null.
  static void withdraw(const MoeLayer& layer) noexcept;
  static void withdraw(const MoeLayer& layer, Communicator* communicator,
                       std::string_view reason) noexcept;

  // True once all of the scope is staged.
  bool is_staged() const;

  // XXH3-64 of what this rank holds: equal for layers of one plan with equal weights, whatever way
  // these came, and whatever the order of experts' places. It covers, in this order, each routed
  // expert's number and packed slabs, shared experts, the residual MLP, the layer's own matrices
  // and vectors, and steps of rows; no adapters. Reads all of it on the calling thread, beside
  // forwards; a commit waits. Throws Error(kState) while experts are on their way or without
  // complete weights.
  static uint64_t content_hash(const MoeLayer& layer);

 private:
  friend class GraphReplay;
  static std::shared_ptr<const void> begin_replay(const MoeLayer& layer, Stream stream);
  static size_t kept_bytes(const MoeLayer& layer);
  static size_t forget_graphs(const MoeLayer& layer);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A forward that was captured in a graph, each time it is launched: a layer sees forwards alone,
// not replays. Make one, launch the graph on the stream, destroy it; then the replay is to a refit
// what a forward is. Not needed while no other thread commits a refit or overwrites weights in
// place. On "cpu" it only keeps a refit out.
class CONCLAVE_API GraphReplay {
 public:
  // Waits for a commit that is handing over. Throws Error(kState) without complete weights.
  GraphReplay(const MoeLayer& layer, Stream stream);
  GraphReplay(const GraphReplay&) = delete;
  GraphReplay& operator=(const GraphReplay&) = delete;
  // A commit may go on; the stream need not have passed.
  ~GraphReplay();

  // Adapters that a captured forward was given stay in memory, also once they are removed, since
  // graphs are launched without the layer. These are the bytes of those that are gone otherwise.
  static size_t kept_bytes(const MoeLayer& layer);
  // Says that no graph which holds a forward of the layer, or of one that shares its weights, is
  // launched any more: gives that memory back and returns its bytes. Waits for the device. From any
  // thread, but not while such a forward is being captured.
  static size_t forget_graphs(MoeLayer& layer);

 private:
  std::shared_ptr<const void> replay_;
};

}  // namespace conclave::inline v0
