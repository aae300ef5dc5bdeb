// A model family as plain data: which config keys fill which spec fields, which layers are MoE, and
// which tensor names hold which matrices. docs/adding-an-architecture.md walks through one table.
#pragma once

#include "conclave/spec.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// The spellings of one config key; the first one present counts.
class KeyNames {
 public:
  static constexpr size_t kMaxSpellings = 4;

  constexpr KeyNames() = default;
  template <class... Names>
  constexpr explicit(false) KeyNames(std::string_view first, Names... others)
      : names_{first, others...}, count_(1 + sizeof...(others)) {
    static_assert(1 + sizeof...(others) <= kMaxSpellings);
  }
  constexpr KeyNames(const char* first) : KeyNames(std::string_view(first)) {}

  constexpr bool empty() const { return count_ == 0; }
  constexpr std::span<const std::string_view> names() const { return {names_.data(), count_}; }

 private:
  std::array<std::string_view, kMaxSpellings> names_{};
  size_t count_ = 0;
};

struct SizeKeys {
  KeyNames num_experts;
  KeyNames top_k;
  KeyNames intermediate_size;              // of one routed expert
  KeyNames shared_intermediate_size = {};  // empty: no shared expert
};

// A layer is MoE when every condition that the family states holds; none stated: every layer is.
struct LayerRule {
  KeyNames dense_layers = {};  // a list: layer i is dense if i is in it
  KeyNames sparse_step =
      {};  // layer i is dense unless (i + 1) % step == 0; 1 where the key is absent
};

struct RouterRule {
  RouterScore score = RouterScore::kSoftmax;
  KeyNames renormalize_key = {};    // empty: the family has no such key
  bool renormalize_default = true;  // where there is no key, or the config leaves it out
};

// What a tensor holds. Parts from kRouter on exist once a layer.
enum class Part : uint8_t {
  kGate,
  kUp,
  kDown,
  kGateUp,  // gate rows, then up rows
  kRouter,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kSharedExpertGate,
};
constexpr bool is_expert_part(Part part) { return part < Part::kRouter; }

// A tensor name after "layers.N.". With {expert} (a decimal number) the tensor is one matrix
// [rows, cols]; an expert part without it is a stack [E, rows, cols] or [E, cols, rows].
struct NamePattern {
  std::string_view text;
  Part part;
};

// One way of storing the routed experts. A layer uses exactly one.
struct ExpertForm {
  std::string_view name;  // "per_expert", "stacked"
  std::span<const NamePattern> patterns;
};

// How a stack is read when its shape fits both [E, rows, cols] and [E, cols, rows].
enum class StackOrder : uint8_t { kRowsFirst, kColsFirst };

struct Architecture {
  std::string_view name;
  std::span<const std::string_view> model_types;
  std::string_view layers = "layers";  // the component before the layer number
  // Parts of a MoE layer in which every tensor must match a pattern: "mlp".
  std::span<const std::string_view> blocks;
  SizeKeys sizes;
  KeyNames activation = {"hidden_act"};  // "silu" where the key is absent
  LayerRule layer_rule = {};
  RouterRule router = {};
  SharedMode shared = SharedMode::kNone;
  std::span<const ExpertForm> expert_forms;  // the usual one first
  std::span<const NamePattern> once;         // router and shared expert; alternatives of a part
                                             // stand in order of preference
  StackOrder ambiguous_stack = StackOrder::kRowsFirst;
};

// All tables, in the order in which they are listed to the user.
std::span<const Architecture* const> architectures();
// The table whose model_types hold `model_type`, or null.
const Architecture* find_architecture(std::string_view model_type);

}  // namespace conclave::inline v0::checkpoint
