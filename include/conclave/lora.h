// Low-rank adapters (LoRA) of a layer's experts, several at once, chosen token by token.
//
// An expert whose matrix W [out, in] has factors a [r, in] and b [out, r] computes
// W x + scale b (a x) for the tokens that have the adapter: before the activation for gate and up,
// before the weighted sum for down. Tokens without it keep every bit of the layer without adapters.
#pragma once

#include "conclave/tensor.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// The largest rank that LayerOptions::max_adapter_rank may have.
inline constexpr int32_t kMostAdapterRank = 512;

// The factors of one matrix of one expert. Both are f32, f16 or bf16 in host memory, aligned to
// their elements; rows may be apart (row_stride). Gate and up may share the memory of `a`, as a
// fused gate_up has it: it is then held and multiplied once.
struct LoraFactors {
  WeightMlp mlp = WeightMlp::kRouted;  // or kShared; residual MLPs take no adapters
  WeightMatrix matrix = WeightMatrix::kUp;
  int64_t expert = 0;      // the logical expert; of shared experts, its number
  ConstTensorView a = {};  // [r, in]
  ConstTensorView b = {};  // [out, r]
  double scale = 1;        // lora_alpha / r, or what a checkpoint has in its place
  std::string name = {};   // for error texts
};

// An adapter of one layer. Matrices that are not listed are not adapted. The views' memory must
// live until add_adapter has returned; `memory` keeps it where the adapter itself owns it.
struct LoraAdapter {
  std::string name = {};  // for error texts and AdapterInfo: a path, or anything
  std::vector<LoraFactors> factors = {};
  std::shared_ptr<const void> memory = {};
};

// Names an adapter of one layer: 0, 1, ... in the order in which they were added, never used twice.
using AdapterId = int32_t;
inline constexpr AdapterId kNoAdapter = -1;

struct AdapterInfo {
  AdapterId id = kNoAdapter;
  std::string name;
  int64_t max_rank = 0;     // the largest of its matrices
  int64_t num_factors = 0;  // as given
  size_t bytes = 0;         // that this rank holds
};

// Throws what MoeLayer::add_adapter would for a layer of this spec: kShape, kDType, kNullPointer,
// kMisaligned, kStride, kTensorValue for a value that is not finite, kTensorDuplicate,
// kInvalidArgument, kUnsupported; each names the tensor. `max_rank`: the rank that is allowed.
CONCLAVE_API void check_adapter(const LoraAdapter& adapter, const MoeSpec& spec,
                                int64_t max_rank = kMostAdapterRank);

}  // namespace conclave::inline v0
