// Where a layer's weights come from. `MoeLayer::create` and `reload` pull from a WeightSource,
// expert by expert, in parallel; checkpoints, raw pointers and synthetic layers implement it.
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

// Matrices are row-major [rows, cols] with cols the reduction axis.
enum class WeightRole : uint8_t {
  kGate,              // per expert [I, H]
  kUp,                // per expert [I, H]
  kDown,              // per expert [H, I]
  kRouter,            // one [E, H]; expert index 0
  kSharedGate,        // one [Is, H]; expert index 0, as all below
  kSharedUp,          // one [Is, H]
  kSharedDown,        // one [H, Is]
  kSharedExpertGate,  // one [1, H]
};
CONCLAVE_API std::string_view to_string(WeightRole role) noexcept;

// What a source holds in a role. `count` matrices of `rows` x `cols` elements of `dtype`;
// count = 0 means the role is absent.
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
  // block's bytes. Throws Error on a failed read.
  virtual void read(WeightRole role, int64_t expert, const WeightBlock& block,
                    std::span<std::byte> destination) const = 0;

  // The whole matrix [rows, cols] in place, where the source has it in memory in that layout;
  // an empty view otherwise. Valid as long as the source.
  virtual ConstTensorView view(WeightRole role, int64_t expert) const;

  // "model-00001-of-00003.safetensors: model.layers.0.mlp..." for error texts.
  virtual std::string locate(WeightRole role, int64_t expert) const;
};

// Caller-owned weights in the canonical stacked layout; never freed by the library.
struct ExpertWeights {
  ConstTensorView gate_up;                  // [E, 2*I, H]: per expert I gate rows, then I up rows
  ConstTensorView down;                     // [E, H, I]
  ConstTensorView router = {};              // [E, H], optional
  ConstTensorView shared_gate_up = {};      // [2*Is, H], optional
  ConstTensorView shared_down = {};         // [H, Is], optional
  ConstTensorView shared_expert_gate = {};  // [1, H], optional
};

// A source over raw pointers. The views' memory must outlive the source. Throws Error(kShape,
// kDType, kNullPointer, kMisaligned).
CONCLAVE_API std::unique_ptr<WeightSource> make_pointer_source(const ExpertWeights& weights);

}  // namespace conclave::inline v0
