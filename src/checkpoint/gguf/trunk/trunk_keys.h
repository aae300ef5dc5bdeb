// The numbers that say how a trunk computes, from config.json to keys of a GGUF file and back.
#pragma once

#include "checkpoint/gguf/trunk/trunk_table.h"
#include "io/gguf/file.h"
#include "io/json.h"

#include "conclave/gguf.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The largest head count or size of a head: products of two sums of these fit int64.
inline constexpr double kLargestPart = 1 << 30;

// The heads and sizes by which rows are put into another order.
struct TrunkSizes {
  int64_t query_heads = 1;
  int64_t key_heads = 1;
  int64_t latent_keys = 0;    // rows of a head of kv_b_proj that are keys
  int64_t latent_values = 0;  // and values
};

// Keys of a file of the architecture. `vocabulary` counts the rows of the embedding. Throws
// Error(kUnsupported) for
// what files do not say.
std::vector<GgufKey> keys_of_config(const TrunkTable& table, std::string_view architecture,
                                    const io::JsonValue& config, int64_t vocabulary);
TrunkSizes sizes_of_config(const TrunkTable& table, const io::JsonValue& config);

// Facts of a file's tensors that config.json states.
struct TrunkFacts {
  std::string_view model_class;
  int64_t vocabulary = 0;
  bool is_tied = false;                            // the embedding is the output's matrix too
  std::function<bool(std::string_view)> has_part;  // whether a layer has a tensor: "attn_q.bias"
};
// Adds to the text of config.json what it does not state. Throws likewise.
std::string config_of_keys(const TrunkTable& table, std::string_view architecture,
                           const io::GgufFile& file, const TrunkFacts& facts,
                           std::string_view config);
TrunkSizes sizes_of_keys(const TrunkTable& table, std::string_view architecture,
                         const io::GgufFile& file);

}  // namespace conclave::inline v0::checkpoint
