// Sources of a layer's weights. `MoeLayer::create` and `reload` pull from a WeightSource, expert by
// expert, in parallel; checkpoints, raw pointers and synthetic layers implement it.
#pragma once

#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/version.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0 {

// Matrices are row-major [rows, cols] with cols the reduction axis. Roles "per expert" hold E
// matrices, "per shared expert" S, all others one, at expert index 0. Routed experts of a layer
// with a latent projection have Hl in place of H. Without a gate (ActivationSpec) kGate,
// kSharedGate, kResidualGate and their biases are absent. Vectors are matrices of one row. Gate, up
// and down have the type MoeSpec::weight_dtype in routed experts and their own types in shared
// experts and the residual MLP; every other role is f32, f16 or bf16 by itself, the hash table
// integer. Ir and Is are the widths of the residual MLP and of a shared expert.
//
// Matrices of codes [rows, cols] have scales [scale rows, scale cols]: [1, 1] for
// WeightScale::kTensor, [rows, 1] for kChannel, [ceil(rows / block_rows), ceil(cols / block_cols)]
// for kBlock; they are f32, f16, bf16 or e8m0, finite and not negative. Input scales exist for
// ActivationScale::kTensorStatic only, are [1, 1] and positive: x is read as codes of x / scale.
enum class WeightRole : uint8_t {
  kGate,              // per expert [I, H]
  kUp,                // per expert [I, H]
  kDown,              // per expert [H, I]
  kRouter,            // [logits, H]: num_logits(spec) rows
  kSharedGate,        // per shared expert [Is, H]
  kSharedUp,          // per shared expert [Is, H]
  kSharedDown,        // per shared expert [H, Is]
  kSharedExpertGate,  // [1, H]
  kGateBias,          // per expert [1, I]
  kUpBias,            // per expert [1, I]
  kDownBias,          // per expert [1, H]
  kSharedGateBias,    // per shared expert [1, Is]
  kSharedUpBias,      // per shared expert [1, Is]
  kSharedDownBias,    // per shared expert [1, H]
  kRouterBias,        // [1, logits]
  kSelectionBias,     // [1, E + Z]
  kExpertScale,       // [1, E]
  kGlobalScale,       // [1, 1]
  kRouterInputScale,  // [1, H]
  kHashTable,         // [vocab, k] int32 or int64
  kMixGate,           // [2, H]: weights of the routed and of the shared part
  kMixGateBias,       // [1, 2], optional
  kLatentDown,        // [Hl, H]
  kLatentNorm,        // [1, Hl]
  kLatentUp,          // [H, Hl]
  kOutputBias,        // [1, H]
  kResidualGate,      // [Ir, H]
  kResidualUp,        // [Ir, H]
  kResidualDown,      // [H, Ir]

  kGateScale,             // per expert, scales of kGate
  kUpScale,               // per expert, scales of kUp
  kDownScale,             // per expert, scales of kDown
  kGateInputScale,        // per expert [1, 1]: for the rows that kGate multiplies
  kUpInputScale,          // per expert [1, 1]
  kDownInputScale,        // per expert [1, 1]: for the activated rows
  kSharedGateScale,       // per shared expert, scales of kSharedGate, and so on
  kSharedUpScale,         // per shared expert
  kSharedDownScale,       // per shared expert
  kSharedGateInputScale,  // per shared expert [1, 1]
  kSharedUpInputScale,    // per shared expert [1, 1]
  kSharedDownInputScale,  // per shared expert [1, 1]
};
inline constexpr size_t kNumWeightRoles =
    static_cast<size_t>(WeightRole::kSharedDownInputScale) + 1;
CONCLAVE_API std::string_view to_string(WeightRole role) noexcept;

// Contents of a role: `count` matrices of `rows` x `cols` elements of `dtype`; count = 0 means the
// role is absent.
struct WeightInfo {
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kF32;
};

// A block of one matrix, in elements.
struct WeightBlock {
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t col_begin = 0;
  int64_t col_end = 0;
};

// Thread rule: describe, read and view are called from several threads at once.
// Lifetime: a source handed to create or reload must live until that call returns.
class CONCLAVE_API WeightSource {
 public:
  virtual ~WeightSource() = default;

  virtual WeightInfo describe(WeightRole role) const = 0;

  // Writes the block, dense and row-major, in the role's dtype. destination.size() is exactly the
  // block's bytes. Throws Error on a failed read. A layer asks only for the rows and columns that
  // its rank holds, and for large matrices in several blocks of rows.
  virtual void read(WeightRole role, int64_t expert, const WeightBlock& block,
                    std::span<std::byte> destination) const = 0;

  // The whole matrix [rows, cols] in place, if the source has it in memory() in that layout (rows
  // may be apart); otherwise an empty view. Valid as long as the source.
  virtual ConstTensorView view(WeightRole role, int64_t expert) const;

  // The memory that views lie in: kHost unless overridden. A layer on the same device copies or
  // uses views of kDevice; matrices without a view are then refused, and layers on "cpu" refuse
  // such a source.
  virtual MemoryKind memory() const;

  // Names the matrix in error texts: "model-00001-of-00003.safetensors: model.layers.0.mlp...".
  virtual std::string locate(WeightRole role, int64_t expert) const;
};

// Order of the rows in a fused gate_up tensor.
enum class GateUpOrder : uint8_t {
  kConcatenated,  // I gate rows, then I up rows
  kInterleaved,   // gate 0, up 0, gate 1, up 1, ... (gpt-oss)
  kSingle,        // I rows of the one product of an activation without a gate
};

// Caller-owned weights in the canonical stacked layout; never freed by the library. All but gate_up
// and down are optional; their shapes are those of the roles. Vectors have shape [n].
struct ExpertWeights {
  ConstTensorView gate_up;                                // [E, 2*I, H], or [E, I, H] with kSingle
  ConstTensorView down;                                   // [E, H, I]
  ConstTensorView router = {};                            // [logits, H]
  ConstTensorView shared_gate_up = {};                    // [2*Is, H], or [S, 2*Is, H]
  ConstTensorView shared_down = {};                       // [H, Is], or [S, H, Is]
  ConstTensorView shared_expert_gate = {};                // [1, H]
  GateUpOrder order = GateUpOrder::kConcatenated;         // for gate_up and gate_up_bias
  GateUpOrder shared_order = GateUpOrder::kConcatenated;  // for shared_gate_up and its bias
  ConstTensorView gate_up_bias = {};                      // [E, 2*I] or [E, I], in the same order
  ConstTensorView down_bias = {};                         // [E, H]
  ConstTensorView shared_gate_up_bias = {};               // [2*Is], or [S, 2*Is]
  ConstTensorView shared_down_bias = {};                  // [H], or [S, H]
  ConstTensorView router_bias = {};                       // [logits]
  ConstTensorView selection_bias = {};                    // [E + Z]
  ConstTensorView expert_scale = {};                      // [E]
  ConstTensorView global_scale = {};                      // [1]
  ConstTensorView router_input_scale = {};                // [H]
  ConstTensorView hash_table = {};                        // [vocab, k] int32 or int64
  ConstTensorView mix_gate = {};                          // [2, H]
  ConstTensorView mix_gate_bias = {};                     // [2]
  ConstTensorView latent_down = {};                       // [Hl, H]
  ConstTensorView latent_norm = {};                       // [Hl]
  ConstTensorView latent_up = {};                         // [H, Hl]
  ConstTensorView output_bias = {};                       // [H]
  ConstTensorView residual_gate_up = {};                  // [2*Ir, H], or [Ir, H]
  GateUpOrder residual_order = GateUpOrder::kConcatenated;
  ConstTensorView residual_down = {};  // [H, Ir]
  // Scales of matrices of codes: [E, scale rows of gate, then of up, scale cols], so [E, 2, 1] for
  // WeightScale::kTensor and [E, 2*I, 1] for kChannel, in the order of gate_up; half as many
  // without a gate. [E, 1, 1] is one scale for gate and up. Blocks must not hold rows of both.
  ConstTensorView gate_up_scale = {};
  ConstTensorView down_scale = {};                  // [E, scale rows, scale cols]
  ConstTensorView gate_up_input_scale = {};         // [E]: for gate and up
  ConstTensorView down_input_scale = {};            // [E]
  ConstTensorView shared_gate_up_scale = {};        // [S, scale rows, scale cols]; S optional if 1
  ConstTensorView shared_down_scale = {};           // likewise
  ConstTensorView shared_gate_up_input_scale = {};  // [S]
  ConstTensorView shared_down_input_scale = {};     // [S]
  // The memory of all tensors above. On a device, a layer that holds all experts or a contiguous
  // range uses gate_up [E, 2*I, H] or [E, I, H] and down in place, without a copy, if their rows
  // are 16-byte aligned, dense and concatenated and I is a multiple of 8; it copies all others.
  MemoryKind memory = MemoryKind::kHost;
};

// A source over raw pointers. The views' memory must outlive the source. Throws Error(kShape,
// kDType, kNullPointer, kMisaligned).
CONCLAVE_API std::unique_ptr<WeightSource> make_pointer_source(const ExpertWeights& weights);

}  // namespace conclave::inline v0
