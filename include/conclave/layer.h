// MoeLayer: one fused Mixture-of-Experts layer. Everything is decided in create; forward runs the
// plan straight through, without allocation.
#pragma once

#include "conclave/context.h"
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

// What to do with an id other than -1 that its slot may not hold: outside [0, E + Z), and in the
// slots of fused shared experts (SharedMode::kFusedSlots) anything but that expert's id. -1 always
// contributes nothing.
enum class IdPolicy : uint8_t {
  kStrict,  // Error(kExpertId) naming token and slot, before any output is written
  kSkip,    // contributes nothing (the sentinel of transformers' expert-parallel router)
};

// Variable: counts first, then exactly the rows. Fixed slots: one exchange of a fixed number of
// slots per pair of ranks (padded batch layout), its size known at plan time.
enum class EpTransport : uint8_t { kVariable, kFixedSlots };

// Unreduced rows come home one by one and are summed there in slot order, so that the result does
// not depend on the number of ranks (D3). Per-rank sums move less data but are not D3.
enum class EpCombine : uint8_t { kUnreduced, kReducedPerRank };

struct LayerOptions {
  int64_t max_tokens = 4096;  // tokens planned for; forward takes more in chunks of this size
  IdPolicy id_policy = IdPolicy::kStrict;
  std::string kernel = {};  // row of the kernel catalog to force, e.g. "cpu.avx2"; empty: first fit
  std::string arithmetic = {};  // "f32_fma", "dpbf16", "amx_bf16"; empty: by the CPU table
  EpTransport transport = EpTransport::kVariable;
  EpCombine ep_combine = EpCombine::kUnreduced;
};

// Nanoseconds; a forward adds to them, over all its chunks.
struct StageTimings {
  int64_t route_ns = 0;  // gate product included
  int64_t dispatch_ns = 0;
  int64_t experts_ns = 0;
  int64_t shared_ns = 0;  // and the residual MLP
  int64_t combine_ns = 0;
  int64_t total_ns = 0;
};

// Scratch memory of a forward. One workspace may serve several layers used one after another;
// concurrent forwards need distinct ones.
class CONCLAVE_API Workspace {
 public:
  // Owned memory from the context's allocator. Throws Error(kOutOfMemory).
  Workspace(const Context& context, size_t bytes);
  // Caller's memory, 64-byte aligned. Throws Error(kMisaligned, kNullPointer).
  explicit Workspace(std::span<std::byte> memory);
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;
  ~Workspace();

  std::span<std::byte> memory() const noexcept { return memory_; }

 private:
  HostAllocator* allocator_ = nullptr;
  std::span<std::byte> memory_;
};

// Give exactly one source of routing: router_logits, or topk_ids with topk_weights, or none of them
// when the layer has a gate. topk_ids alone (with logits or a gate) replays recorded choices: the
// router then only weighs them. hidden and out: f32, f16 or bf16, independent of each other and of
// the weights. out may be hidden itself (in place, same type and stride); nothing else that is
// written may overlap anything. All views are read or written until forward returns, in host
// memory, aligned to their elements; rows may be apart (row_stride).
struct ForwardArgs {
  ConstTensorView hidden = {};          // [T, H]
  ConstTensorView router_logits = {};   // [T, num_logits(spec)] f32, f16 or bf16
  ConstTensorView topk_ids = {};        // [T, num_slots(spec)] int32 or int64
  ConstTensorView topk_weights = {};    // [T, num_slots(spec)] f32, f16 or bf16
  ConstTensorView router_input = {};    // [T, H] the gate reads instead of hidden; only if it runs
  ConstTensorView residual_input = {};  // [T, H] the residual MLP reads instead of hidden
  ConstTensorView token_ids = {};       // [T] int32 or int64, of router "hash": rows of its table
  ConstTensorView padding_mask = {};    // [T] bool; false: the token is padding, its output is 0
  const int64_t* num_tokens = nullptr;  // if given: only the first *num_tokens <= T rows count;
                                        // the others of out are not written

  TensorView out = {};  // [T, H]
  // [T, H]; if given, the shared part is written here and out lacks it: their sum is what out would
  // have been, up to rounding. Gates, slot weights and the factors of kAverage and kSoftmaxMix are
  // in both parts.
  TensorView shared_out = {};
  TensorView captured_logits = {};   // [T, num_logits(spec)] f32: what the router saw
  TensorView captured_ids = {};      // [T, num_slots(spec)] int32, logical ids; -1: skipped
  TensorView captured_weights = {};  // [T, num_slots(spec)] f32
  // [E] logical; this call's rows per expert are added. Padding, zero and shared experts are not
  // counted.
  std::span<int64_t> expert_load = {};

  Workspace* workspace = nullptr;  // null: the layer's own (then one forward at a time)
  StageTimings* timings = nullptr;
};

// Sticky counters since create, of this rank.
struct LayerStatus {
  int64_t forwards = 0;
  int64_t tokens = 0;
  int64_t skipped_ids = 0;  // ids other than -1 dropped by IdPolicy::kSkip
  int64_t tokens_without_finite_logit = 0;
};

// One row of a table of alternatives, as considered by the plan.
struct PlanRow {
  std::string table;  // "kernel", "dispatcher", "router"
  std::string name;   // "cpu.avx512"
  bool chosen = false;
  std::string reason;  // why rejected; for the chosen row, why it came first
};

struct Plan {
  std::vector<PlanRow> rows;
  std::string isa;
  std::string arithmetic;   // one for every row count: fixed for the layer's life
  std::string determinism;  // "D1 D2 D3"
  std::string tile;         // "6x64, panels of 64 columns"
  std::string router;
  std::string dispatcher;
  std::vector<std::string> stages;  // of a forward, in order: "route", "latent down 1024"
  std::string part;                 // "3 of 8 experts on rank 1 of 3": what this rank holds
  int64_t max_tokens = 0;
  int64_t num_local_experts = 0;  // physical ones
  size_t workspace_bytes = 0;
  size_t packed_bytes = 0;
  std::string packed_layout;  // "panel64.k2.v1"
};

enum class ReloadMode : uint8_t {
  kStaged,   // packs a second copy, then swaps; needs twice the memory for a moment
  kInPlace,  // validates every header, then overwrites; addresses stay. If a read fails midway,
             // forward throws Error(kState) until a reload completes
};

// Immutable after create, but for reload. Concurrent forwards are allowed with distinct workspaces.
class CONCLAVE_API MoeLayer {
 public:
  // Validates, plans, and packs this rank's experts or slices. Collective over the context's
  // communicators that `parallel` needs: none with Reduce::kPartial. `context` must outlive the
  // layer; `source` only this call. Throws Error naming the field or tensor: kInvalidArgument,
  // kUnknownName, kUnsupported with the reason of every row, kTensorMissing, kTensorShape,
  // kTensorDType, kExpertId (hash table), kOutOfMemory; CommError where ranks disagree; and what
  // the source throws.
  static MoeLayer create(const Context& context, const MoeSpec& spec, const WeightSource& source,
                         const LayerOptions& options = {}, const ParallelSpec& parallel = {});
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;
  ~MoeLayer();

  // Throws Error before anything is written if an argument is wrong. Any T from 0. Collective
  // as create: expert-parallel ranks each with their own T, tensor-parallel ranks with the same
  // tokens. A CommError comes midway: out is then incomplete. docs/architecture.md has the formula.
  void forward(const ForwardArgs& args) const;

  // New weights of the same shapes and types, on this rank alone. Not concurrent with forward.
  // Throws as create does for a source.
  void reload(const WeightSource& source, ReloadMode mode);

  const MoeSpec& spec() const noexcept;
  const ParallelSpec& parallel() const noexcept;
  const Plan& plan() const noexcept;
  size_t workspace_bytes() const noexcept;
  LayerStatus status() const noexcept;

 private:
  struct Impl;
  explicit MoeLayer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The plan that create would make, without weights. Never throws for "cannot": the rows say why.
CONCLAVE_API Plan make_plan(const Context& context, const MoeSpec& spec,
                            const LayerOptions& options = {}, const ParallelSpec& parallel = {});
// The plan as aligned text, one line per row, rejected rows with their reason.
CONCLAVE_API std::string explain(const Plan& plan);

}  // namespace conclave::inline v0
