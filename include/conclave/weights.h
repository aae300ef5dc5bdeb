// Sources of a layer's weights. `MoeLayer::create` and `reload` pull from a WeightSource, expert by
// expert, in parallel; checkpoints, raw pointers and synthetic layers implement it.
#pragma once

#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/version.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0 {

// These name an MLP, one of its matrices, and a plane of the matrix. A plane is one of the arrays
// in which a matrix is stored: its values or codes, and what gives codes a meaning.
enum class WeightMlp : uint8_t { kRouted, kShared, kResidual };
enum class WeightMatrix : uint8_t { kGate, kUp, kDown };
enum class WeightPlane : uint8_t {
  kWeights,       // [rows, cols]: values, or codes
  kBias,          // [1, rows]
  kScale,         // w = code * scale
  kZero,          // what WeightZero says
  kSecondScale,   // scales of scales, one for each group of blocks
  kGlobalScale,   // [1, 1]: a factor of all scales of the matrix
  kInputScale,    // [1, 1]: the step of the rows that the matrix multiplies
  kColumnOrder,   // [1, cols]: the group of each column, where groups are not neighbours
  kColumnFactor,  // [1, cols]: what each column of the rows is multiplied by first; optional
};
// Weights that a layer has beside its MLPs, one of each.
enum class LayerWeight : uint8_t {
  kRouter,            // [logits, H]: num_logits(spec) rows
  kRouterBias,        // [1, logits]
  kRouterInputScale,  // [1, H]
  kSelectionBias,     // [1, E + Z]
  kExpertScale,       // [1, E]
  kGlobalScale,       // [1, 1]
  // Tensors that only one router of the catalog reads. Each such tensor has a number of its own;
  // which one it is, its router's row says.
  kRouterTensor0,
  kRouterTensor1,
  kRouterTensor2,
  kRouterTensor3,
  kRouterTensor4,
  kRouterTensor5,
  kRouterTensor6,
  kRouterTensor7,
  kSharedExpertGate,            // [1, H]
  kMixGate,                     // [2, H]: weights of the routed and of the shared part
  kMixGateBias,                 // [1, 2], optional
  kLatentDown,                  // [Hl, H]
  kLatentNorm,                  // [1, Hl]
  kLatentUp,                    // [H, Hl]
  kOutputBias,                  // [1, H]
  kHashTable = kRouterTensor0,  // [vocab, k] int32 or int64
};

// The name of one array of a layer's weights: a plane of a matrix of an MLP, or a LayerWeight.
//
// Matrices are row-major [rows, cols] with cols the reduction axis: gate and up [I, H], down
// [H, I]. Routed experts have E matrices of each kind, shared experts S, the residual MLP and the
// layer one, at expert index 0. Shared experts and the residual MLP have widths of their own.
// Routed experts of a layer with a latent projection have Hl in place of H. Without a gate
// (ActivationSpec) the matrices kGate and their planes are absent. Vectors are matrices of one row.
// Weights of routed experts have the type MoeSpec::weight_dtype, those of shared experts and of the
// residual MLP their own; everything else is f32, f16 or bf16 by itself, but for what a router
// reads as integers, such as the hash table.
//
// Matrices of codes [rows, cols] have scales [scale rows, scale cols]: [1, 1] for
// WeightScale::kTensor, [rows, 1] for kChannel, [ceil(rows / block_rows), ceil(cols / block_cols)]
// for kBlock; they are f32, f16, bf16, e8m0 or e4m3, finite, and not negative unless
// QuantSpec::signed_scales says so. Zeros have the shape of the scales and are f32, f16 or bf16.
// The global scale is one number for a matrix. The order of columns is int32 or int64 [1, cols],
// each entry below ceil(cols / block_cols). Factors of columns are f32, f16 or bf16 [1, cols],
// finite, and the same for gate and up of an expert, which read the same rows; a kind of matrix
// without any has ones. Input scales exist
// for ActivationScale::kTensorStatic only and are positive: x is read as codes of x / scale. No
// format has second scales yet.
class WeightId {
  static constexpr size_t kMlps = static_cast<size_t>(WeightMlp::kResidual) + 1;
  static constexpr size_t kMatrices = static_cast<size_t>(WeightMatrix::kDown) + 1;
  static constexpr size_t kPlanes = static_cast<size_t>(WeightPlane::kColumnFactor) + 1;
  static constexpr size_t kPlanesOfMlps = kMlps * kMatrices * kPlanes;

 public:
  // All ids: each has an index below it.
  static constexpr size_t kCount =
      kPlanesOfMlps + static_cast<size_t>(LayerWeight::kOutputBias) + 1;
  static_assert(kCount <= 256);

  constexpr WeightId(WeightMlp mlp, WeightMatrix matrix,
                     WeightPlane plane = WeightPlane::kWeights) noexcept
      : index_(static_cast<uint8_t>(
            (static_cast<size_t>(mlp) * kMatrices + static_cast<size_t>(matrix)) * kPlanes +
            static_cast<size_t>(plane))) {}
  constexpr WeightId(LayerWeight weight) noexcept  // NOLINT(google-explicit-constructor)
      : index_(static_cast<uint8_t>(kPlanesOfMlps + static_cast<size_t>(weight))) {}

  // A place in tables by id. It may change from one version of the library to the next.
  constexpr size_t index() const noexcept { return index_; }
  static constexpr WeightId from_index(size_t index) noexcept {
    WeightId id(LayerWeight::kRouter);
    id.index_ = static_cast<uint8_t>(index);
    return id;
  }

  // The parts of the name; weights of the layer itself have `layer` only, and others do not.
  constexpr std::optional<WeightMlp> mlp() const noexcept {
    if (index_ >= kPlanesOfMlps) return std::nullopt;
    return static_cast<WeightMlp>(index_ / (kPlanes * kMatrices));
  }
  constexpr std::optional<WeightMatrix> matrix() const noexcept {
    if (index_ >= kPlanesOfMlps) return std::nullopt;
    return static_cast<WeightMatrix>(index_ / kPlanes % kMatrices);
  }
  constexpr std::optional<WeightPlane> plane() const noexcept {
    if (index_ >= kPlanesOfMlps) return std::nullopt;
    return static_cast<WeightPlane>(index_ % kPlanes);
  }
  constexpr std::optional<LayerWeight> layer() const noexcept {
    if (index_ < kPlanesOfMlps) return std::nullopt;
    return static_cast<LayerWeight>(index_ - kPlanesOfMlps);
  }

  // Another plane of the same matrix. The id must be that of a plane.
  constexpr WeightId with(WeightPlane plane) const noexcept {
    return from_index(index_ / kPlanes * kPlanes + static_cast<size_t>(plane));
  }

  friend constexpr bool operator==(WeightId, WeightId) noexcept = default;

 private:
  uint8_t index_;
};
// "gate", "shared_down_scale", "router": for messages.
CONCLAVE_API std::string to_string(WeightId id);

// The ids of matrices, whose other planes are weights::kGate.with(WeightPlane::kScale), and of the
// layer's own weights.
namespace weights {

inline constexpr WeightId kGate{WeightMlp::kRouted, WeightMatrix::kGate};
inline constexpr WeightId kUp{WeightMlp::kRouted, WeightMatrix::kUp};
inline constexpr WeightId kDown{WeightMlp::kRouted, WeightMatrix::kDown};
inline constexpr WeightId kSharedGate{WeightMlp::kShared, WeightMatrix::kGate};
inline constexpr WeightId kSharedUp{WeightMlp::kShared, WeightMatrix::kUp};
inline constexpr WeightId kSharedDown{WeightMlp::kShared, WeightMatrix::kDown};
inline constexpr WeightId kResidualGate{WeightMlp::kResidual, WeightMatrix::kGate};
inline constexpr WeightId kResidualUp{WeightMlp::kResidual, WeightMatrix::kUp};
inline constexpr WeightId kResidualDown{WeightMlp::kResidual, WeightMatrix::kDown};
inline constexpr WeightId kRouter{LayerWeight::kRouter};
inline constexpr WeightId kRouterBias{LayerWeight::kRouterBias};
inline constexpr WeightId kRouterInputScale{LayerWeight::kRouterInputScale};
inline constexpr WeightId kSelectionBias{LayerWeight::kSelectionBias};
inline constexpr WeightId kExpertScale{LayerWeight::kExpertScale};
inline constexpr WeightId kGlobalScale{LayerWeight::kGlobalScale};
inline constexpr size_t kMaxRouterTensors = 8;
// `number` below kMaxRouterTensors.
constexpr WeightId router_tensor(size_t number) noexcept {
  return static_cast<LayerWeight>(static_cast<size_t>(LayerWeight::kRouterTensor0) + number);
}
inline constexpr WeightId kHashTable{LayerWeight::kHashTable};
inline constexpr WeightId kSharedExpertGate{LayerWeight::kSharedExpertGate};
inline constexpr WeightId kMixGate{LayerWeight::kMixGate};
inline constexpr WeightId kMixGateBias{LayerWeight::kMixGateBias};
inline constexpr WeightId kLatentDown{LayerWeight::kLatentDown};
inline constexpr WeightId kLatentNorm{LayerWeight::kLatentNorm};
inline constexpr WeightId kLatentUp{LayerWeight::kLatentUp};
inline constexpr WeightId kOutputBias{LayerWeight::kOutputBias};

// Every id once, for loops.
inline constexpr std::array<WeightId, WeightId::kCount> kAll =
    []<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return std::array{WeightId::from_index(kIndex)...};
    }(std::make_index_sequence<WeightId::kCount>());

}  // namespace weights

// The ids of the tensors that routers of the catalog have of their own; to_string says their names.
CONCLAVE_API std::vector<WeightId> router_tensors();

// A table with an entry for every id.
template <class T>
class WeightTable {
 public:
  T& operator[](WeightId id) noexcept { return entries_[id.index()]; }
  const T& operator[](WeightId id) const noexcept { return entries_[id.index()]; }

 private:
  std::array<T, WeightId::kCount> entries_{};
};

// A source has `count` matrices of `rows` x `cols` elements of `dtype` for an id, or none if count
// is 0.
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

  virtual WeightInfo describe(WeightId id) const = 0;

  // Writes the block, dense and row-major, in the dtype that describe gives. destination.size() is
  // exactly the block's bytes. Throws Error on a failed read. A layer asks only for the rows and
  // columns that its rank holds, and for large matrices in several blocks of rows.
  virtual void read(WeightId id, int64_t expert, const WeightBlock& block,
                    std::span<std::byte> destination) const = 0;

  // The whole matrix [rows, cols] in place, if the source has it in memory() in that layout (rows
  // may be apart); otherwise an empty view. Valid as long as the source.
  virtual ConstTensorView view(WeightId id, int64_t expert) const;

  // A caller has copied this block of a view and does not need it again: a source of a mapped file
  // gives its pages back, until someone reads them again. Does nothing unless overridden.
  virtual void release(WeightId id, int64_t expert, const WeightBlock& block) const;

  // The memory that views lie in: kHost unless overridden. A layer on the same device copies or
  // uses views of kDevice; matrices without a view are then refused, and layers on "cpu" refuse
  // such a source.
  virtual MemoryKind memory() const;

  // Names the matrix in error texts: "model-00001-of-00003.safetensors: model.layers.0.mlp...".
  virtual std::string locate(WeightId id, int64_t expert) const;

  // A layer has read what it wanted and asks, before it uses any of it, whether the source was the
  // same all the time: throws Error(kFileChanged) if another process has written meanwhile. Does
  // nothing unless overridden.
  virtual void check_unchanged() const;
};

// Order of the rows in a fused gate_up tensor.
enum class GateUpOrder : uint8_t {
  kConcatenated,  // I gate rows, then I up rows
  kInterleaved,   // gate 0, up 0, gate 1, up 1, ... (gpt-oss)
  kSingle,        // I rows of the one product of an activation without a gate
};

// Caller-owned weights in the canonical stacked layout; never freed by the library. All but gate_up
// and down are optional; their shapes are those of the ids. Vectors have shape [n].
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
  ConstTensorView gate_up_input_scale = {};         // [E]: for gate and up; or [E, 2]
  ConstTensorView down_input_scale = {};            // [E]
  ConstTensorView shared_gate_up_scale = {};        // [S, scale rows, scale cols]; S optional if 1
  ConstTensorView shared_down_scale = {};           // likewise
  ConstTensorView shared_gate_up_input_scale = {};  // [S] or [S, 2]
  ConstTensorView shared_down_input_scale = {};     // [S]
  // Zeros of codes, in the shapes that scales have.
  ConstTensorView gate_up_zero = {};
  ConstTensorView down_zero = {};
  ConstTensorView shared_gate_up_zero = {};
  ConstTensorView shared_down_zero = {};
  ConstTensorView gate_up_global_scale = {};         // [E]: for gate and up; or [E, 2]
  ConstTensorView down_global_scale = {};            // [E]
  ConstTensorView shared_gate_up_global_scale = {};  // [S] or [S, 2]
  ConstTensorView shared_down_global_scale = {};     // [S]
  // The group of each column, int32 or int64.
  ConstTensorView gate_up_column_order = {};         // [E, H]: for gate and up; or [E, 2, H]
  ConstTensorView down_column_order = {};            // [E, I]
  ConstTensorView shared_gate_up_column_order = {};  // [S, H] or [S, 2, H]
  ConstTensorView shared_down_column_order = {};     // [S, Is]
  // Each column of the rows is multiplied by its factor; the shapes are those of orders.
  ConstTensorView gate_up_column_factor = {};
  ConstTensorView down_column_factor = {};
  ConstTensorView shared_gate_up_column_factor = {};
  ConstTensorView shared_down_column_factor = {};
  // Tensors of a router's own, by name (docs/routing.md); the hash table may stand here as well.
  std::map<std::string, ConstTensorView> router_tensors = {};
  // The memory of all tensors above. On a device, a layer that holds all experts or a contiguous
  // range uses gate_up [E, 2*I, H] or [E, I, H] and down in place, without a copy, if their rows
  // are 16-byte aligned, dense and concatenated and I is a multiple of 8; it copies all others.
  MemoryKind memory = MemoryKind::kHost;
};

// A source over raw pointers. The views' memory must outlive the source. Throws Error(kShape,
// kDType, kNullPointer, kMisaligned).
CONCLAVE_API std::unique_ptr<WeightSource> make_pointer_source(const ExpertWeights& weights);

}  // namespace conclave::inline v0
