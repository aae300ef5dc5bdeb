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

// Keys with the value that counts where the config gives none (absent or null). No key: always it.
struct SizeKey {
  KeyNames key = {};
  std::optional<int64_t> otherwise = {};  // nothing: the key is required
};
struct NumberKey {
  KeyNames key = {};
  double otherwise = 0;
};
struct FlagKey {
  KeyNames key = {};
  bool otherwise = false;
};

// Sizes. Each may be a list with a value a layer, unless `lists` says otherwise.
struct SizeKeys {
  KeyNames num_experts;
  KeyNames top_k;
  KeyNames intermediate_size;   // of one routed expert
  int64_t hidden_multiple = 0;  // I where its key is absent: this times H
  KeyNames hidden_size = "hidden_size";
  KeyNames num_layers = "num_hidden_layers";
  SizeKey zero_experts = {};  // Z
  KeyNames latent_size = {};  // Hl
  FlagKey latent_norm = {};
  // What a list in place of a number means: a value a layer, or one for text and one for images.
  enum class Lists : uint8_t { kPerLayer, kText, kVision } lists = Lists::kPerLayer;
};

// A layer is MoE when every condition that is stated holds; none stated: every layer is. A list of
// kinds (`kinds`, `pattern`) or of layers (`moe_layers`), where the config has one, decides alone.
struct LayerRule {
  KeyNames dense_layers = {};  // a list: layer i is dense if i is in it
  SizeKey sparse_step = {};    // layer i is dense unless (i + 1) % step == 0
  // Layers below it are dense. The value for an absent key gives way to any list.
  SizeKey first_moe = {};
  KeyNames frequency = {};  // i % f == 0; or a list, f[i] != 0
  SizeKey period = {};      // i % period == offset
  SizeKey offset = {};
  KeyNames last_moe = {};    // -1: the last layer
  KeyNames moe_layers = {};  // [3, 4] or "3,4"
  KeyNames kinds = {};       // a list of names, a layer each
  KeyNames pattern = {};     // a text, a letter a layer: 'E' is MoE
  FlagKey enabled = {.otherwise = true};
  bool zero_experts_make_dense = false;  // num_experts = 0 is a dense model, not an error
};
// Layers whose ids come from a table: the first n, or those of kind "hash_moe".
struct HashRule {
  KeyNames first_layers = {};
  int64_t otherwise = 0;  // n where the config has neither key nor kinds
};

// What the router's product, or its scores, are rounded to.
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
  bool selection_bias_by_file = false;  // there where the file has one
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

// Which formula a name in the config stands for.
enum class ActivationForm : uint8_t {
  kGated,        // silu, gelu, gelu_tanh
  kUngated,      // the same and relu2, of one product
  kSwigluOai,    // whatever the name
  kClampBefore,  // silu with bounds, where `limit` is above 0
  kClampAfter,
  kSitu,  // whatever the name
};
struct ActivationRule {
  KeyNames key = {"hidden_act"};
  std::string_view otherwise = "silu";
  ActivationForm form = ActivationForm::kGated;
  NumberKey limit = {};  // or a list, a value a layer; 0 or null: none
  NumberKey alpha = {};
  NumberKey beta = {};
  NumberKey linear_beta = {};
};

// Shared experts: `count` of them, each of `size` (I where there is no such key), stored as one of
// their summed width. 0 of either means none.
struct SharedRule {
  SharedMode mode = SharedMode::kNone;
  SizeKey size = {};
  SizeKey count = {.otherwise = 1};
  FlagKey enabled = {.otherwise = true};
  std::optional<ActivationRule> activation = {};  // where it differs from the routed experts'
};

struct ResidualRule {
  FlagKey enabled = {};
  KeyNames size = {};
};

// How a stack is read when its shape fits both [E, rows, cols] and [E, cols, rows].
enum class StackOrder : uint8_t { kByShape, kRowsFirst, kColsFirst };

struct Architecture {
  std::string_view name;
  std::span<const std::string_view> model_types;
  std::string_view layers = "layers";  // the component before the layer number
  // Where {base} of a pattern may stand: "mlp.", or nothing. The usual one first.
  std::span<const std::string_view> bases;
  // Parts of a MoE layer beside the bases in which every tensor must match a pattern.
  std::span<const std::string_view> more_blocks = {};
  // Starts of names that hold experts of another part of the model, which are not read.
  std::span<const std::string_view> skipped = {};
  SizeKeys sizes;
  LayerRule layer_rule = {};
  RouterRule router = {};
  ActivationRule activation = {};
  SharedRule shared = {};
  ResidualRule residual = {};
  FlagKey expert_bias = {};  // of gate, up and down
  FlagKey shared_bias = {};
  FlagKey weight_on_input = {};
  bool output_bias = false;
  // The family's own names, before those that every family accepts (generic_names.h).
  std::span<const ExpertForm> expert_forms = {};
  std::span<const NamePattern> once = {};
  StackOrder ambiguous_stack = StackOrder::kRowsFirst;
  // Layers with 2E experts for two modalities: which E are read. The other table, where there is
  // one.
  enum class Modality : uint8_t { kOnly, kFirst, kSecond } modality = Modality::kOnly;
  const Architecture* vision = nullptr;
  // What no field above can say; runs on the finished spec of each layer. May set `support`.
  void (*adjust)(const ConfigReader& config, int64_t layer, MoeSpec& spec,
                 Support& support) = nullptr;
  // Another table, for configurations of the same model_type that mean something else; or null.
  const Architecture* (*choose)(const ConfigReader& config) = nullptr;
};

// All tables, in the order in which they are listed to the user.
std::span<const Architecture* const> architectures();
// The table whose model_types hold `model_type`, or null.
const Architecture* find_architecture(std::string_view model_type);

}  // namespace conclave::inline v0::checkpoint
