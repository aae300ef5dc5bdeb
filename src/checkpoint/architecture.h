// A model family as plain data: which config keys fill which spec fields, which layers are MoE, and
// which tensor names hold which matrices. docs/adding-an-architecture.md walks through one table.
#pragma once

#include "checkpoint/name_pattern.h"

#include "conclave/error.h"
#include "conclave/spec.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace conclave::inline v0::checkpoint {

class ConfigReader;

// The spellings of one config key; the first one present counts. A dot leads into a nested object:
// "ffn_config.moe_top_k".
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

// Keys with the value that counts if the config gives none (absent or null). Without a key, that
// value always counts.
struct SizeKey {
  KeyNames key = {};
  std::optional<int64_t> otherwise = {};  // empty: the key is required
};
struct NumberKey {
  KeyNames key = {};
  double otherwise = 0;
};
struct FlagKey {
  KeyNames key = {};
  bool otherwise = false;
};

// Sizes. Each may be a list with one value per layer, unless `lists` says otherwise.
struct SizeKeys {
  KeyNames num_experts;
  KeyNames top_k;
  KeyNames intermediate_size;   // per routed expert
  int64_t hidden_multiple = 0;  // if the key is absent, I is this times H
  KeyNames hidden_size = "hidden_size";
  KeyNames num_layers = "num_hidden_layers";
  SizeKey zero_experts = {};  // Z
  KeyNames latent_size = {};  // Hl
  FlagKey latent_norm = {};
  // A list in place of a number holds one value per layer, or one for text and one for images.
  enum class Lists : uint8_t { kPerLayer, kText, kVision } lists = Lists::kPerLayer;
};

// A layer is MoE if it meets every stated condition; if none is stated, every layer is MoE. If the
// config has a list of kinds (`kinds`, `pattern`) or of layers (`moe_layers`), it decides alone.
struct LayerRule {
  KeyNames dense_layers = {};  // a list: layer i is dense if i is in it
  SizeKey sparse_step = {};    // layer i is dense unless (i + 1) % step == 0
  // Layers below this number are dense. The value for an absent key gives way to any list.
  SizeKey first_moe = {};
  KeyNames frequency = {};  // i % f == 0; or a list, f[i] != 0
  SizeKey period = {};      // i % period == offset
  SizeKey offset = {};
  KeyNames last_moe = {};    // -1: the last layer
  KeyNames moe_layers = {};  // [3, 4] or "3,4"
  KeyNames kinds = {};       // a list of names, one per layer
  KeyNames pattern = {};     // a text with one letter per layer: 'E' is MoE
  FlagKey enabled = {.otherwise = true};
  bool zero_experts_make_dense = false;  // num_experts = 0 is a dense model, not an error
};
// Layers whose ids come from a table: the first n, or those of kind "hash_moe".
struct HashRule {
  KeyNames first_layers = {};
  int64_t otherwise = 0;  // n if the config has neither key nor kinds
};

// The type that the router's product, or its scores, are rounded to.
enum class RouterPrecision : uint8_t {
  kModel,   // the model's type
  kStored,  // the type that the router's matrix is stored in
  kF32,
};
enum class ScaleOn : uint8_t { kWeights, kOutput };

struct RouterRule {
  std::string_view name = "topk";
  RouterScore score = RouterScore::kSoftmax;
  KeyNames score_key = {};  // "softmax", "sigmoid", "sqrtsoftplus"; replaces `score`
  RouterOrder order = RouterOrder::kScoreThenTopk;
  RouterPrecision logits = RouterPrecision::kModel;
  RouterPrecision scores = RouterPrecision::kF32;
  FlagKey logit_bias = {};
  FlagKey selection_bias = {};
  bool selection_bias_by_file = false;  // a layer has one if the file holds it
  NumberKey soft_cap = {};

  SizeKey num_groups = {.otherwise = 1};
  SizeKey topk_groups = {.otherwise = 1};
  GroupScore group_score = GroupScore::kTop2Sum;
  GroupMask group_mask = GroupMask::kNegInf;

  FlagKey renormalize = {.otherwise = true};
  NumberKey epsilon = {};
  EpsilonMode epsilon_mode = EpsilonMode::kAdd;
  NumberKey scale = {.otherwise = 1};
  ScaleOn scale_on = ScaleOn::kWeights;
  bool expert_scale = false;
  bool global_scale = false;
  bool input_norm = false;
  NumberKey jitter = {};
  HashRule hash = {};
};

// The formula that a name in the config stands for.
enum class ActivationForm : uint8_t {
  kGated,        // silu, gelu, gelu_tanh
  kUngated,      // the same and relu2, from a single product
  kSwigluOai,    // whatever the name is
  kClampBefore,  // silu with bounds, if `limit` is above 0
  kClampAfter,
  kSitu,  // whatever the name is
};
struct ActivationRule {
  KeyNames key = {"hidden_act"};
  std::string_view otherwise = "silu";
  ActivationForm form = ActivationForm::kGated;
  NumberKey limit = {};  // or a list with one value per layer; 0 or null: none
  NumberKey alpha = {};
  NumberKey beta = {};
  NumberKey linear_beta = {};
};

// Shared experts: `count` of them, each of width `size` (I if there is no such key), stored as one
// expert of their summed width. If either is 0, there are none.
struct SharedRule {
  SharedMode mode = SharedMode::kNone;
  SizeKey size = {};
  SizeKey count = {.otherwise = 1};
  FlagKey enabled = {.otherwise = true};
  std::optional<ActivationRule> activation = {};  // set if it differs from the routed experts'
};

struct ResidualRule {
  FlagKey enabled = {};
  KeyNames size = {};
};

// How a stack is read when its shape fits both [E, rows, cols] and [E, cols, rows].
enum class StackOrder : uint8_t { kByShape, kRowsFirst, kColsFirst };

// Whether the model's class in transformers says that its stacks are [E, in, out]. PEFT asks it
// from 0.19 on, and takes those of a class that does not for [E, out, in].
enum class StackWords : uint8_t { kUnknown, kUnsaid };

struct Architecture {
  std::string_view name;
  std::span<const std::string_view> model_types;
  std::string_view layers = "layers";  // the component before the layer number
  // Texts that {base} in a pattern may stand for: "mlp.", or nothing. The usual one comes first.
  std::span<const std::string_view> bases;
  // Other parts of a MoE layer, beside the bases, in which every tensor must match a pattern.
  std::span<const std::string_view> more_blocks = {};
  // Prefixes of names that hold the experts of another part of the model; these are not read.
  std::span<const std::string_view> skipped = {};
  SizeKeys sizes;
  LayerRule layer_rule = {};
  RouterRule router = {};
  ActivationRule activation = {};
  SharedRule shared = {};
  ResidualRule residual = {};
  FlagKey expert_bias = {};  // for gate, up and down
  FlagKey shared_bias = {};
  FlagKey weight_on_input = {};
  bool output_bias = false;
  // The family's own names; they come before those that every family accepts (generic_names.h).
  std::span<const ExpertForm> expert_forms = {};
  std::span<const NamePattern> once = {};
  StackOrder ambiguous_stack = StackOrder::kRowsFirst;
  StackWords cols_first_words = StackWords::kUnknown;
  // For layers with 2E experts for two modalities: which E are read, and the table that reads the E
  // for images, if there is one.
  enum class Modality : uint8_t { kOnly, kFirst, kSecond } modality = Modality::kOnly;
  const Architecture* vision = nullptr;
  // Sets what no field above can say; runs on the finished spec of each layer. May set `support`.
  void (*adjust)(const ConfigReader& config, int64_t layer, MoeSpec& spec,
                 Support& support) = nullptr;
  // Returns another table for configurations of the same model_type that mean something else, or
  // null.
  const Architecture* (*choose)(const ConfigReader& config) = nullptr;
};

// All tables, in the order in which they are listed to the user.
std::span<const Architecture* const> architectures();
// The table whose model_types contain `model_type`, or null.
const Architecture* find_architecture(std::string_view model_type);

}  // namespace conclave::inline v0::checkpoint
