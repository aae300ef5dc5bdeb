// Names of an adapter's tensors say which layer, block, expert and matrix they belong to.
#pragma once

#include "conclave/weights.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0 {

// A matrix that a module adapts.
enum class LoraMatrix : uint8_t { kGate, kUp, kDown, kGateUp };

enum class LoraPlace : uint8_t {
  kElsewhere,  // no part of a MoE block
  kExpert,     // a projection of one routed expert
  kStacked,    // a parameter of all routed experts: shapes say which
  kShared,     // a projection of the shared experts
  kUnknown,    // another part of the block, as its router
};

// A module that has adapters.
struct LoraModule {
  std::string name;  // "model.layers.0.mlp.experts.3.gate_proj", as PEFT's patterns see it
  int64_t layer = -1;
  LoraPlace place = LoraPlace::kElsewhere;
  int64_t expert = 0;
  LoraMatrix matrix = LoraMatrix::kUp;
  // Stacked parameters of one module wrap each other: how far inside this one is.
  int64_t depth = 0;
};

// A tensor's module and which factor it is.
struct LoraName {
  LoraModule module;
  bool is_b = false;
};

// Nothing for a tensor that is no factor, as one of modules_to_save.
std::optional<LoraName> parse_lora_name(std::string_view tensor);
// The module of a name without the factor, for messages and for the block that it is in.
LoraModule parse_lora_module(std::string_view module);

}  // namespace conclave::inline v0
