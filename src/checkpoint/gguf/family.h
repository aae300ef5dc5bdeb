// The graphs of llama.cpp fix some properties of an architecture that GGUF files do not state.
// Sizes, biases and the layers with experts follow from the tensors, everything else from keys.
#pragma once

#include "conclave/spec.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The function of the router's logits, numbered as the key expert_gating_func.
enum class GgufGating : uint8_t {
  kNone = 0,
  kSoftmax = 1,
  kSigmoid = 2,
  kSoftmaxOfChosen = 3,
  kSqrtSoftplus = 4,
};

// Whether a rule is fixed or the file's key decides.
enum class GgufRule : uint8_t { kNever, kAlways, kKey };

// Which layers of a file have a tensor that some layers do without. kOneForAll: all, if one has.
enum class GgufPresence : uint8_t { kNever, kAlways, kOneForAll };

// Which blocks have experts.
enum class GgufBlocks : uint8_t {
  kAll,
  kBehindDense,  // those behind as many dense ones as leading_dense_block_count says
  kByTensors,    // those with tensors of experts
};

enum class GgufActivation : uint8_t {
  kSilu,  // with bounds after silu, if swiglu_clamp_exp gives some
  kSiluClampBefore,
  kGeluTanh,
  kSwigluOai,
  kRelu2,
  kSitu,
};

struct GgufFamily {
  std::string_view name;        // general.architecture
  std::string_view model_type;  // the Hugging Face family that has such layers
  GgufGating gating = GgufGating::kSoftmax;
  GgufRule gating_by = GgufRule::kAlways;  // kKey: `gating` counts if the file has no key
  GgufRule renormalize = GgufRule::kAlways;
  GgufRule scale = GgufRule::kNever;  // kKey: expert_weights_scale, unless it is 0
  GgufActivation activation = GgufActivation::kSilu;
  double clamp_otherwise = 0;  // the limit if there is no key
  GgufBlocks blocks = GgufBlocks::kAll;
  GgufPresence gate = GgufPresence::kAlways;  // routed and shared experts have one
  GgufPresence selection_bias = GgufPresence::kOneForAll;
  SharedMode shared = SharedMode::kAdd;
  // Whether there must be shared experts; kKey: if expert_shared_count or
  // expert_shared_feed_forward_length is above 0. Tensors count under any rule.
  GgufRule shared_by = GgufRule::kNever;
  bool has_biases = false;      // the router and the experts have some
  bool chooses_logits = false;  // the logits choose, whatever the function is
  bool weight_on_input = false;
  bool has_residual = false;       // ffn_gate, ffn_up and ffn_down are a MLP beside the experts
  bool scales_experts = false;     // ffn_down_exps.scale belongs to the router
  bool normalises_router = false;  // ffn_gate_inp.scale is the weight of a norm before the router
  std::string_view refused = {};   // why its layers do not run; empty: they do
};

// Sorted by name.
std::span<const GgufFamily> gguf_families() noexcept;
const GgufFamily* find_gguf_family(std::string_view name) noexcept;

// The Hugging Face families that files of this architecture are written of, besides the family's
// own model_type.
std::vector<std::string_view> written_model_types(std::string_view architecture);

}  // namespace conclave::inline v0::checkpoint
