// MoeLayer: one fused Mixture-of-Experts layer. Everything is decided in create; forward runs the
// plan straight through, without allocation.
#pragma once

#include "conclave/balance.h"
#include "conclave/context.h"
#include "conclave/migration.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// Treatment of an id other than -1 that its slot may not hold: one outside [0, E + Z), or in a slot
// of fused shared experts (SharedMode::kFusedSlots) any but that expert's id. -1 always contributes
// nothing.
enum class IdPolicy : uint8_t {
  kStrict,  // Error(kExpertId) naming token and slot, before any output is written
  kSkip,    // contributes nothing (the sentinel of transformers' expert-parallel router)
};

// kVariable exchanges counts first, then exactly the rows. kFixedSlots makes one exchange of a
// fixed number of slots per pair of ranks (padded batch layout), its size known at plan time.
enum class EpTransport : uint8_t { kVariable, kFixedSlots };

// kUnreduced: rows come home one by one and are summed there in slot order, so that the result does
// not depend on the number of ranks (D3). kReducedPerRank moves less data but is not D3; layers on
// CUDA always do so. kRoundedPerRank, on CUDA only, rounds each rank's float32 sum to the 16 bits
// of expert rows before it travels: half of the bytes, and a rounding more for each rank that adds.
enum class EpCombine : uint8_t { kUnreduced, kReducedPerRank, kRoundedPerRank };

// Orders the chunks of a call where rows travel between ranks. No bit differs. Without such ranks
// chunks always run in turn.
enum class ChunkOrder : uint8_t {
  kInTurn,        // one chunk after the other
  kByTwos,        // the rows of one travel while experts of another run; twice the workspace
  kMicroBatches,  // as kByTwos, and calls of LayerOptions::micro_batch_tokens or more are cut in
                  // two at least. Where these are at most max_tokens, in less than twice the
                  // workspace
};

// Promises which results have the same bits on CUDA. The CPU always gives kBatchInvariant.
enum class Determinism : uint8_t {
  kRepeatable,      // D1: the same call gives the same bits, run after run
  kBatchInvariant,  // D1 and D2: neither the other tokens of a call nor their number changes a
                    // token's bits. One arithmetic for every T: no single-launch kernel for few
                    // tokens, which costs up to half of the time below 16 tokens; docs/numerics.md
  kUnordered,       // neither: kernels that can do so add up a token's expert rows as they come,
                    // others run as kRepeatable (Plan::rows says which). As little as half the
                    // workspace, but 2 to 22 % more time as measured: docs/numerics.md
};

// Says where a layer on the CPU has its experts' weights. No bit of a result depends on it.
enum class WeightUse : uint8_t {
  kPacked,   // copied into the layer's own panels
  kInPlace,  // read in every forward where the source has them in memory, without a copy that
             // stays: those of type f32, f16 or bf16 whose views the source gives; others are
             // packed, and Plan::rows says why. The source must outlive the layer, and its memory
             // must stay as it is: of a checkpoint opened with FileAccess::kMap no process may
             // truncate or rewrite a file. A forward makes panels in its workspace, one for each
             // worker at a time: docs/numerics.md has what that costs
};

class TuningTable;
struct LoraAdapter;
struct AdapterInfo;

struct LayerOptions {
  int64_t max_tokens = 4096;  // tokens planned for; forward takes more in equal chunks
  IdPolicy id_policy = IdPolicy::kStrict;
  std::string kernel = {};  // row of the kernel catalog to force, e.g. "cpu.avx2"; empty: first fit
  // "f32_fma", "dpbf16", "amx_bf16", "int8_dot"; empty: by the CPU table
  std::string arithmetic = {};
  EpTransport transport = EpTransport::kVariable;
  EpCombine ep_combine = EpCombine::kUnreduced;
  ChunkOrder chunk_order = ChunkOrder::kInTurn;
  // For kMicroBatches, the tokens of a rank's call from which on it is cut in two; one rank with as
  // many is enough for all. 0: as the plan finds it worth while, which explain() says.
  int64_t micro_batch_tokens = 0;
  Determinism determinism = Determinism::kRepeatable;
  WeightUse weights = WeightUse::kPacked;  // "cpu" only; on CUDA kInPlace is Error(kUnsupported)
  // Places for experts on each rank beside those of its placement, into which experts move while
  // forwards go on (conclave/migration.h). Equal on all ranks, 0 to 1024. On CUDA weights that lie
  // on the device are copied then.
  int32_t spare_experts = 0;
  // The largest rank of adapters that may be added (conclave/lora.h): 0 to kMostAdapterRank, equal
  // on all ranks. The workspace has room for their terms; 0: none can be added.
  int32_t max_adapter_rank = 0;
  // Measured choices that precede the built-in ones on CUDA; null: none. The layer shares them.
  std::shared_ptr<const TuningTable> tuning = {};
};

// Nanoseconds; each forward adds its time, over all its chunks.
struct StageTimings {
  int64_t route_ns = 0;  // gate product included
  int64_t dispatch_ns = 0;
  int64_t experts_ns = 0;
  int64_t shared_ns = 0;  // includes the residual MLP
  int64_t combine_ns = 0;
  int64_t total_ns = 0;
};

// Scratch memory of a forward. One workspace may serve several layers used one after another;
// concurrent forwards need distinct ones. On a device its first 256 bytes hold the counters by
// which blocks of a launch wait for each other: the constructor clears them, every forward leaves
// them zero, and nobody else may write them while the workspace lives.
class CONCLAVE_API Workspace {
 public:
  // Owns memory of the context's device, from its allocator. Given a stream, the memory is for work
  // on that stream; without one it is ready on return. Throws Error(kOutOfMemory, kDevice).
  Workspace(const Context& context, size_t bytes, Stream stream = {});
  // Borrows the caller's host memory, 64-byte aligned. Throws Error(kMisaligned, kNullPointer).
  explicit Workspace(std::span<std::byte> memory);
  // Borrows the caller's memory of the context's device, 256-byte aligned (64 on "cpu"), which must
  // outlive the work that uses it. Clears the first 256 bytes on `stream`; without one it waits for
  // that. Throws Error(kMisaligned, kNullPointer), and kDevice for memory elsewhere.
  Workspace(const Context& context, std::span<std::byte> memory, Stream stream = {});
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;
  ~Workspace();

  std::span<std::byte> memory() const noexcept { return memory_; }
  MemoryKind kind() const noexcept { return kind_; }

 private:
  HostAllocator* allocator_ = nullptr;
  DeviceAllocator* device_allocator_ = nullptr;
  Stream stream_;
  MemoryKind kind_ = MemoryKind::kHost;
  std::span<std::byte> memory_;
};

// Give exactly one source of routing: router_logits, or topk_ids with topk_weights, or none of them
// when the layer has a gate. topk_ids alone (with logits or a gate) replays recorded choices: the
// router then only weighs them. hidden and out: f32, f16 or bf16, independent of each other and of
// the weights. out may be hidden itself (in place, same type and stride); nothing else that is
// written may overlap anything. All views are aligned to their elements; rows may be apart
// (row_stride).
// On "cpu" all memory is host memory, read or written until forward returns. On CUDA every pointer
// here, num_tokens and expert_load too, is memory of the context's device; forward enqueues on
// `stream` and returns, and what it was given must live until the stream has passed. A forward
// neither allocates nor waits: it may be captured into a graph, which replays with the same
// pointers and T and the contents they then have.
struct ForwardArgs {
  ConstTensorView hidden = {};          // [T, H]
  ConstTensorView router_logits = {};   // [T, num_logits(spec)] f32, f16 or bf16
  ConstTensorView topk_ids = {};        // [T, num_slots(spec)] int32 or int64
  ConstTensorView topk_weights = {};    // [T, num_slots(spec)] f32, f16 or bf16
  ConstTensorView router_input = {};    // [T, H]; the gate, if it runs, reads it instead of hidden
  ConstTensorView residual_input = {};  // [T, H]; the residual MLP reads it instead of hidden
  ConstTensorView token_ids = {};       // [T] int32 or int64, for router "hash": rows of its table
  ConstTensorView padding_mask = {};    // [T] bool; false: the token is padding, its output is 0
  ConstTensorView adapter_ids = {};     // [T] int32 or int64 of add_adapter; -1: no adapter
  int32_t adapter = -1;                 // the same for all tokens, in place of adapter_ids
  // If given, only the first *num_tokens <= T rows count; the other rows of out are not written. On
  // CUDA it is read when the work runs; more than T counts as T, fewer than 0 as 0.
  const int64_t* num_tokens = nullptr;
  // Limits of this call's choices (docs/routing.md, "Limits of a call"). On CUDA bans of each token
  // lie in its memory; those of all tokens may lie in host memory, which forward then reads itself.
  int64_t top_k = 0;                    // slots of a token that are filled, 1 to k; 0: all
  ConstTensorView banned_experts = {};  // [E + Z] or [T, E + Z] bool; true: not to be chosen
  int64_t expert_budget = 0;            // experts of all tokens together, k to E; 0: any number

  TensorView out = {};  // [T, H]
  // [T, H]; if given, the shared part is written here and out lacks it: their sum is what out would
  // have been, up to rounding. Gates, slot weights and the factors of kAverage and kSoftmaxMix are
  // in both parts.
  TensorView shared_out = {};
  TensorView captured_logits = {};   // [T, num_logits(spec)] f32: the logits that the router saw
  TensorView captured_ids = {};      // [T, num_slots(spec)] int32, logical ids; -1: skipped
  TensorView captured_weights = {};  // [T, num_slots(spec)] f32
  // [E] logical experts; this call's rows per expert are added. Padding, zero and shared experts
  // are not counted.
  std::span<int64_t> expert_load = {};

  // The rows of `hidden` of every expert-parallel rank in this call, by ep_rank, the same list on
  // all of them; host memory, read before forward returns. Empty: ranks ask each other. With it a
  // layer on CUDA asks nobody, and ranks that were given other lists fail with kCommMismatch.
  std::span<const int64_t> rank_tokens = {};

  Workspace* workspace = nullptr;   // null: the layer's own (then one forward at a time)
  Stream stream = {};               // needed on CUDA, unused on "cpu"
  StageTimings* timings = nullptr;  // "cpu" only; Error(kUnsupported) on CUDA, where stages overlap
};

// Sticky counters since create, of this rank and of all layers that share its weights. On CUDA
// `forwards` and `tokens` count host calls of forward, with T whatever num_tokens says, and no
// replays of a graph; the other counters count on the device.
struct LayerStatus {
  int64_t forwards = 0;
  int64_t tokens = 0;
  // Ids other than -1 that were dropped: by IdPolicy::kSkip, and on CUDA by kStrict too; and there
  // choices for which bans in device memory leave no expert, and ids of adapters that the layer has
  // not. forward cannot see any of them.
  int64_t skipped_ids = 0;
  int64_t tokens_without_finite_logit = 0;
  // The number of the last refit that was committed (conclave/refit.h), 0 before any. Ranks compare
  // it in each forward.
  uint64_t refit_epoch = 0;
  // Rows of the gate that have NaN now, whose experts are chosen only where nothing else can be.
  int64_t gate_rows_with_nan = 0;
};

// One row of a table of alternatives that the plan considered.
struct PlanRow {
  std::string table;  // "kernel", "dispatcher", "router", "group", "weights"
  std::string name;   // "cpu.avx512"
  bool chosen = false;
  std::string reason;  // why it was rejected; for the chosen row, why it came first
};

// The kernel for calls of `first_tokens` to `last_tokens` tokens, on CUDA.
struct PlanRung {
  int64_t first_tokens = 0;
  int64_t last_tokens = 0;
  std::string kernel;  // "cuda.stream_sm90"
  std::string tile;    // "16x128x128B, 6 stages"
  std::string reason;  // "least by the cost model", "tuning table"
  size_t workspace_bytes = 0;
};

// A piece of the workspace. It holds something from its first stage to its last; before and after
// these, other pieces may lie in the same place.
struct PlanBuffer {
  std::string name;  // "expert rows"
  size_t bytes = 0;
  std::string first_stage;  // writes it
  std::string last_stage;   // the last one to read it
};

struct Plan {
  std::vector<PlanRow> rows;
  std::string device;            // "cpu"; "cuda:0 NVIDIA H200, 132 multiprocessors"
  std::vector<PlanRung> ladder;  // ascending, without gaps, from 1 to max_tokens; empty on "cpu"
  std::string isa;
  std::string arithmetic;   // the same for every row count, fixed for the layer's life
  std::string determinism;  // "D1 D2 D3"; "none" for sums in any order
  std::string tile;         // "6x64, panels of 64 columns"
  std::string router;
  std::string dispatcher;
  std::vector<std::string> stages;  // stages of a forward, in order: "route", "latent down 1024"
  std::vector<PlanBuffer> buffers;  // between the stages, for max_tokens
  std::string part;                 // the part this rank holds: "3 of 8 experts on rank 1 of 3"
  int64_t max_tokens = 0;
  int64_t num_local_experts = 0;  // physical experts, of the first placement
  size_t workspace_bytes = 0;
  size_t packed_bytes = 0;
  size_t in_place_bytes = 0;  // weights read in the source's memory take them: WeightUse
  std::string packed_layout;  // "panel64.k2.v1"
};

enum class ReloadMode : uint8_t {
  kStaged,   // packs a second copy, then swaps; needs twice the memory for a moment
  kInPlace,  // validates every header, then overwrites; addresses stay. If a read fails midway,
             // forward throws Error(kState) until a reload completes
};

// Immutable after create, except for reload and the placement of experts. Concurrent forwards need
// distinct workspaces, and on CUDA distinct streams. Destruction does not wait for work that a
// stream still holds: synchronise the stream first.
class CONCLAVE_API MoeLayer {
 public:
  // Validates, plans, and packs this rank's experts or slices. Collective over the context's
  // communicators that `parallel` needs: none with Reduce::kPartial. `context` must outlive the
  // layer; `source` only this call, unless WeightUse::kInPlace says more. Throws Error naming the
  // field or tensor: kInvalidArgument, kUnknownName, kUnsupported with the reason of every row,
  // kTensorMissing, kTensorShape, kTensorDType, kExpertId (hash table), kOutOfMemory; CommError
  // where ranks disagree; and what the source throws. On CUDA weights are copied expert by expert
  // through pinned memory. If the source is in device memory (WeightSource::memory) and its
  // matrices lie as MoeLayer keeps them, they are used in place and must outlive the layer.
  // docs/architecture.md has the layout. Throws Error(kDevice) if the device failed, or a tensor
  // said to be in its memory is not.
  static MoeLayer create(const Context& context, const MoeSpec& spec, const WeightSource& source,
                         const LayerOptions& options = {}, const ParallelSpec& parallel = {});
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;
  ~MoeLayer();

  // Throws Error before anything is written if an argument is wrong. T may be any number from 0.
  // Collective as create: expert-parallel ranks each have their own T, tensor-parallel ranks the
  // same tokens. A CommError comes midway: out is then incomplete. docs/architecture.md has the
  // formula. On CUDA forward does not look at values in device memory: ids out of range are skipped
  // and counted (LayerStatus::skipped_ids), whatever the IdPolicy. There it waits for no rank
  // either: a CommError of an earlier call comes from a later one, or from Communicator::check once
  // the stream has passed, and what was written since the last such check is then no result.
  void forward(const ForwardArgs& args) const;

  // A layer planned for calls of up to `max_tokens` tokens on the same packed weights: nothing is
  // packed or copied, addresses stay, and on the CPU no result changes by a bit. Layers that share
  // weights share status() and reload, which must not run during a forward of any of them; the
  // weights live as long as the last layer. Collective as create. On CUDA a graph captured from
  // this layer stays valid while both live. Up to kReplannedTokens tokens, or those this layer
  // plans for, the call asks for no device memory and so may run while a stream is captured. Throws
  // as create does for options. Concurrent with forward, not with reload.
  static constexpr int64_t kReplannedTokens = 16384;
  MoeLayer with_max_tokens(int64_t max_tokens) const;

  // Moves experts to the slots that `slots` gives each rank, then returns; between two forwards,
  // on every rank with the same slots and options; on CUDA after waiting for the device, and
  // captured graphs read the new places. Experts that stay keep their addresses. Replicas
  // may become those of other experts; a rank has at most as many experts as places: those of the
  // first placement and all spare ones but one. Nothing is held twice but a spare place, or,
  // without spare_experts, a temporary one where experts change places in a circle. With
  // Reduce::kPartial and no communicator in the options, this rank alone reads its experts from the
  // source. Throws Error: kInvalidArgument naming the field; kUnsupported with the reason, as
  // Migration; kState if a migration is under way, or on CUDA a stream captured; CommError:
  // kCommMismatch where ranks disagree or a copy differs, on each; kCommPeerLost, kCommTimeout;
  // what the source throws. Then the layer stays at the last placement that all ranks had reached,
  // with the same results. Only where an expert is in a temporary place then, forward throws
  // Error(kState) until another update_placement completes. Layers that share weights share the
  // placement.
  void update_placement(const ExpertSlots& slots, const MigrationOptions& options = {});
  // The same, to the slots of another split of the same ranks: placement, rank_of and replicas are
  // read, the rest must be as in parallel().
  void update_placement(const ParallelSpec& next, const MigrationOptions& options = {});
  // The experts of each rank now, in the order of their places.
  ExpertSlots slots() const;
  // Counts the placements that the layer has had, the first being 0. Equal on all ranks.
  uint64_t placement_epoch() const;
  // The same layer on other ranks: on those that are left after a failure, or on more. `context`
  // has their communicators, `parallel` says how they split it (without_ranks: as before, without
  // some). What this rank has packed serves where it lies; experts that it lacks are read from
  // `source`, which all ranks give or none does; a rank that joins with nothing calls create, with
  // the same spec, options and split. This layer stays as it is, shares that memory and may be
  // destroyed at any time; counters of status() begin anew. Collective over the new ranks.
  // `context` has the same device and must outlive the result. Throws as create does, and without a
  // source Error(kTensorMissing) on every rank, with an expert that one of them lacks. All experts
  // are read anew where this rank's columns of them change. On CUDA what is kept is copied on the
  // device, so that both layers have memory of their own until this one goes.
  MoeLayer on_ranks(const Context& context, const ParallelSpec& parallel,
                    const WeightSource* source = nullptr) const;

  // Loads weights of the same shapes and types, on this rank alone. Not concurrent with forward; on
  // CUDA no stream may still hold one. Throws as create does for a source. kInPlace keeps the
  // weights' addresses; kStaged moves the weights, and graphs captured before do not follow. What
  // the layer reads in the source's memory, a new source must have there too, and for kInPlace at
  // the same place: Error(kState) otherwise, before anything is overwritten. Experts are packed
  // where they lie now. Error(kState) while experts are on their way.
  void reload(const WeightSource& source, ReloadMode mode);

  // Adds an adapter and returns its id. Every value is checked and copied; each rank keeps what
  // belongs to its experts and columns. Concurrent with forward: one that is under way does not
  // see it, one that begins later does. With several ranks all of them add and remove the same
  // adapters in the same order and between the same forwards: where they differ, forward throws
  // CommError(kCommMismatch) on each. Layers that share weights share adapters, those of on_ranks
  // begin without any, reload keeps them. Throws Error as check_adapter (conclave/lora.h) does;
  // kUnsupported with the reason where the device takes none, kState without
  // LayerOptions::max_adapter_rank or while experts are on their way, kOutOfMemory.
  int32_t add_adapter(const LoraAdapter& adapter);
  // Forwards that are under way keep it until they end; on CUDA this may wait for them. Throws
  // Error(kInvalidArgument) for an id that is none.
  void remove_adapter(int32_t id);
  // In the order of their ids.
  std::vector<AdapterInfo> adapters() const;

  const MoeSpec& spec() const noexcept;
  const ParallelSpec& parallel() const noexcept;  // as given to create
  const Plan& plan() const noexcept;
  // Bytes that serve calls of any number of tokens.
  size_t workspace_bytes() const noexcept;
  // Bytes that serve calls of up to `tokens` tokens, which forward takes as well; more than
  // max_tokens count as max_tokens. On "cpu" the same as above.
  size_t workspace_bytes(int64_t tokens) const;
  // On CUDA waits for a copy of the counters, not for work that streams hold. Throws Error(kDevice)
  // if work enqueued earlier made the device fail.
  LayerStatus status() const;

 private:
  friend class Migration;
  friend class Refit;
  friend struct LayerAccess;
  struct Impl;
  explicit MoeLayer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The plan that create would make, without weights. It never throws for "cannot": the rows say why.
// `source`, if given, is asked which weights it has in memory (WeightUse); nothing is read of it.
CONCLAVE_API Plan make_plan(const Context& context, const MoeSpec& spec,
                            const LayerOptions& options = {}, const ParallelSpec& parallel = {},
                            const WeightSource* source = nullptr);
// The plan as aligned text, one line per row, rejected rows with their reason.
CONCLAVE_API std::string explain(const Plan& plan);

}  // namespace conclave::inline v0
