#include "checkpoint/gguf/layer_demands.h"

#include "checkpoint/spec_reader.h"
#include "core/shared_facts.h"
#include "routing/router_tensors.h"

#include "conclave/error.h"
#include "conclave/spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kLeading = "leading_dense_block_count";

}  // namespace

GgufLayerRules::GgufLayerRules(const GgufModel& model, const GgufTensorTable& tensors)
    : keys_(model.keys),
      family_(model.family),
      tensors_(tensors),
      num_layers_(model.num_hidden_layers),
      num_blocks_(model.num_blocks) {
  const SizeRange blocks{.low = 0, .high = num_blocks_, .why = ", the number of blocks"};
  if (family_.blocks == GgufBlocks::kBehindDense) num_dense_ = keys_.size(kLeading, 0, blocks);
  // Gates that may still come are waited for: experts without are rare.
  constexpr std::array<std::string_view, 3> kGates = {
      "ffn_gate_exps.weight", "ffn_gate_up_exps.weight", "ffn_gate.0.weight"};
  same_.gate = family_.gate == GgufPresence::kAlways ||
               (family_.gate == GgufPresence::kOneForAll &&
                (!tensors.is_whole() ||
                 std::ranges::any_of(kGates, [&](auto name) { return any_block_has(name); })));
  some_have_selection_bias_ = family_.selection_bias == GgufPresence::kAlways ||
                              (family_.selection_bias == GgufPresence::kOneForAll &&
                               (any_block_has("exp_probs_b.bias") || any_block_has("exp_probs_b")));
  same_.biases = family_.has_biases;
  same_.expert_scale = family_.scales_experts && any_block_has("ffn_down_exps.scale");
  const SizeRange width{.low = 0, .high = kMaxWidth};
  same_.projections = keys_.size("moe_latent_size", 0, width) > 0 ||
                      keys_.size("expert_latent_length", 0, width) > 0;
}

// A type of blocks has factors in all layers of a file or in none: blocks look the same.
bool GgufLayerRules::has_factor(int64_t index, std::string_view matrix) const {
  const GgufPlace stack = tensors_.find(index, fmt::format("{}.weight", matrix));
  if (!stack) return false;
  const auto key = std::pair(std::string(matrix), stack.tensor->type);
  if (const auto known = factors_.find(key); known != factors_.end()) return known->second;
  bool found = false;
  for (int64_t block = 0; block < num_blocks_ && !found; ++block) {
    const auto other = tensors_.find(block, key.first + ".weight");
    found = other && other.tensor->type == key.second && tensors_.find(block, key.first + ".scale");
  }
  return factors_.emplace(key, found).first->second;
}

bool GgufLayerRules::any_block_has(std::string_view name) const {
  for (int64_t block = 0; block < num_blocks_; ++block) {
    if (tensors_.find(block, name)) return true;
  }
  return false;
}

bool GgufLayerRules::is_dense_by_key(int64_t index) const {
  return family_.blocks == GgufBlocks::kBehindDense && index < num_dense_;
}

bool GgufLayerRules::has_experts(int64_t index) const {
  if (const GgufPlace place = tensors_.find_of_experts(index)) {
    if (!is_dense_by_key(index)) return true;
    keys_.reject(ErrorCode::kConfigValue, kLeading,
                 {.what = fmt::format("the key says that layer {} is dense", index),
                  .found = fmt::format("{}, and the tensor {}", num_dense_, place.tensor->name),
                  .limit = fmt::format("{}, the first layer with experts", index)});
  }
  // Blocks of a file may be left out as a whole; extra layers are often dense.
  const bool may_be_dense =
      family_.blocks == GgufBlocks::kByTensors || is_dense_by_key(index) || index >= num_layers_;
  const bool is_there = !tensors_.layer(index).empty() || !tensors_.is_whole();
  return !may_be_dense && is_there && !tensors_.find(index, "ffn_down.weight") &&
         !tensors_.find(index, "ffn_up.weight");
}

bool GgufLayerRules::has_shared(int64_t index) const {
  if (family_.shared_by != GgufRule::kKey) return family_.shared_by == GgufRule::kAlways;
  const SizeRange range{.low = 0, .high = kMaxWidth};
  return keys_.size("expert_shared_count", 0, range, index) > 0 ||
         keys_.size("expert_shared_feed_forward_length", 0, range, index) > 0;
}

// The tensor of another router than the usual one that the layer has, or should have by a key.
const routing::RouterTensor* GgufLayerRules::router_tensor_of(int64_t index) const {
  const SizeRange blocks{.low = 0, .high = num_blocks_, .why = ", the number of blocks"};
  for (const routing::RouterTensor* own : routing::all_router_tensors()) {
    if (own->gguf_name.empty()) continue;
    const bool by_key =
        !own->gguf_layers_key.empty() && index < keys_.size(own->gguf_layers_key, 0, blocks);
    if (by_key || tensors_.find(index, own->gguf_name)) return own;
  }
  return nullptr;
}

// Layers with a table of their own router have none. Where an architecture may do without, all
// layers do.
bool GgufLayerRules::has_selection_bias(int64_t index) const {
  if (router_tensor_of(index) != nullptr) return false;
  return some_have_selection_bias_;
}

GgufDemands GgufLayerRules::demands_of(int64_t index) const {
  GgufDemands demands = same_;
  demands.shared = has_shared(index);
  demands.shared_gate = shared_facts(family_.shared).has_sigmoid_gate();
  demands.selection_bias = has_selection_bias(index);
  demands.router_tensor = router_tensor_of(index);
  demands.gate_factor = has_factor(index, "ffn_gate_exps");
  demands.up_factor = has_factor(index, "ffn_up_exps");
  demands.down_factor = has_factor(index, "ffn_down_exps");
  return demands;
}

}  // namespace conclave::inline v0::checkpoint
