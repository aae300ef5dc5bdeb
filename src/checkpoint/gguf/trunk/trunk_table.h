// The names and keys of everything that models of a family have beside MoE layers, in directories
// and in GGUF files, as data.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace conclave::inline v0::checkpoint {

enum class NamedOrder : uint8_t {
  kSame,
  kQueryPairs,    // files have a head's halves as pairs: llama.cpp rotates neighbours there
  kKeyPairs,      // the same for heads of keys
  kLatentKeys,    // a part of kv_b_proj
  kLatentValues,  // its other part
};

// Names without ".weight" and ".bias", which both containers have alike.
struct NamedTensor {
  std::string_view file;
  std::string_view directory;
  NamedOrder order = NamedOrder::kSame;
  bool is_bare = false;  // in directories there is no ".weight"
};

enum class KeyKind : uint8_t { kSize, kNumber };
enum class KeyUse : uint8_t { kBoth, kFile, kDirectory };

// Keys of files that begin so stand for themselves, whatever the architecture.
inline constexpr std::string_view kWholeNames = "tokenizer.";

// A number that both containers have: file = config + plus.
struct NamedKey {
  std::string_view file;    // after the architecture; a name of "tokenizer." is whole
  std::string_view config;  // dots lead into objects; empty: `otherwise` is written
  KeyKind kind = KeyKind::kSize;
  KeyUse use = KeyUse::kBoth;
  std::string_view plus = {};            // another key of config.json
  std::string_view instead = {};         // a key of config.json, or else of files, if it is absent
  std::optional<double> otherwise = {};  // what a model has without the key
  bool is_optional = false;              // models without the number have no key
};

// A key of config.json that must be absent, null, false or this number: graphs of llama.cpp do not
// know it.
struct FixedKey {
  std::string_view config;
  std::optional<double> number = {};
};

// A flag of config.json that says whether layers have a tensor.
struct PresenceKey {
  std::string_view config;
  std::string_view file;  // "attn_q.bias"
};

// How many values of a head are rotated.
enum class RopeWidth : uint8_t {
  kUnsaid,  // all, or what another key says
  kHead,    // all, and the file says it
  kPartial  // by partial_rotary_factor or rotary_dim
};

struct RopeTable {
  std::string_view base =
      "rope_theta";  // a key of config.json, unless the rotation's object has it
  RopeWidth width = RopeWidth::kUnsaid;
  double partial_otherwise = 1;     // the factor without a key
  bool has_log_multiplier = false;  // yarn_log_multiplier is a tenth of mscale_all_dim
  bool truncates = true;            // what llama.cpp does, and directories may say
  bool has_alpha = false;           // "dynamic" scaling by alpha changes the base alone
};

struct TrunkTable {
  std::string_view layers;  // "model.layers."
  std::span<const NamedTensor> once;
  std::array<std::span<const NamedTensor>, 4> layer = {};  // groups of them
  std::array<std::span<const NamedKey>, 3> keys = {};
  std::span<const FixedKey> fixed = {};
  std::span<const PresenceKey> flags = {};
  bool has_head_dim = true;         // a key of config.json; else heads divide the hidden size
  bool has_grouped_heads = true;    // fewer heads of keys than of queries
  bool says_head_size = true;       // files have key_length and value_length of heads
  bool comes_back = true;           // directories of values have experts as files let them be
  bool alternates_windows = false;  // every second layer, from the first on, has a window
  RopeTable rope = {};
};

extern const TrunkTable kMixtralTrunk;
extern const TrunkTable kQwen2MoeTrunk;
extern const TrunkTable kQwen3MoeTrunk;
extern const TrunkTable kOlmoeTrunk;
extern const TrunkTable kDeepseek2Trunk;
extern const TrunkTable kGptOssTrunk;
extern const TrunkTable kGraniteMoeTrunk;
extern const TrunkTable kGlm4MoeTrunk;
extern const TrunkTable kHunyuanMoeTrunk;
extern const TrunkTable kErnie45MoeTrunk;
extern const TrunkTable kMinimaxM2Trunk;
extern const TrunkTable kDots1Trunk;
extern const TrunkTable kDbrxTrunk;

}  // namespace conclave::inline v0::checkpoint
