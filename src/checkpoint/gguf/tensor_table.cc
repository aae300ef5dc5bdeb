#include "checkpoint/gguf/tensor_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kStart = "blk.";

// "blk.3." of "blk.3.ffn_up_exps.weight"; empty for tensors of no layer.
std::string_view prefix_of(std::string_view name) {
  const size_t dot = name.starts_with(kStart) ? name.find('.', kStart.size()) : name.npos;
  return dot == name.npos ? std::string_view() : name.substr(0, dot + 1);
}

std::string_view name_of(const GgufPlace& place) { return place.tensor->name; }

}  // namespace

std::string gguf_layer_prefix(int64_t layer) { return fmt::format("{}{}.", kStart, layer); }

int64_t gguf_layer_of(std::string_view name) {
  const std::string_view prefix = prefix_of(name);
  if (prefix.empty()) return -1;
  const char* const begin = prefix.data() + kStart.size();
  const char* const end = prefix.data() + prefix.size() - 1;
  int64_t layer = -1;
  const auto [stop, error] = std::from_chars(begin, end, layer);
  // "blk.03." is none of the layers' names.
  const bool is_layer = error == std::errc() && stop == end && gguf_layer_prefix(layer) == prefix;
  return is_layer ? layer : -1;
}

bool is_of_one_expert(std::string_view rest) {
  constexpr std::array<std::string_view, 3> kMatrices = {"ffn_gate.", "ffn_up.", "ffn_down."};
  return std::ranges::any_of(kMatrices, [rest](std::string_view matrix) {
    return rest.starts_with(matrix) && rest.size() > matrix.size() && rest[matrix.size()] >= '0' &&
           rest[matrix.size()] <= '9';
  });
}

bool belongs_to_experts(std::string_view rest) {
  constexpr std::array<std::string_view, 4> kParts = {"ffn_gate_inp", "exp_probs_b", "_exps.",
                                                      "_shexp."};
  if (rest.ends_with(".input_scale") || rest.starts_with("ffn_norm_exps")) return false;
  return is_of_one_expert(rest) || std::ranges::any_of(kParts, [rest](std::string_view part) {
           return rest.find(part) != std::string_view::npos;
         });
}

GgufTensorTable::GgufTensorTable(const io::GgufFile& file)
    : origin_(file.parts().front().file.name()) {
  for (const io::GgufFile::Part& part : file.parts()) {
    for (const io::GgufTensor& tensor : part.header.tensors) {
      const std::string_view prefix = prefix_of(tensor.name);
      if (prefix.empty()) continue;
      layers_[std::string(prefix)].push_back({.tensor = &tensor, .part = &part});
    }
  }
  for (auto& [prefix, own] : layers_) std::ranges::sort(own, {}, name_of);
}

void GgufTensorTable::put(const GgufPlace& place) {
  const std::string_view prefix = prefix_of(place.tensor->name);
  if (prefix.empty()) return;
  std::vector<GgufPlace>& own = layers_[std::string(prefix)];
  const auto at = std::ranges::lower_bound(own, name_of(place), {}, name_of);
  if (at != own.end() && name_of(*at) == name_of(place)) {
    *at = place;
  } else {
    own.insert(at, place);
  }
}

void GgufTensorTable::remove(std::string_view name) {
  const auto layer = layers_.find(prefix_of(name));
  if (layer == layers_.end()) return;
  std::vector<GgufPlace>& own = layer->second;
  const auto at = std::ranges::lower_bound(own, name, {}, name_of);
  if (at != own.end() && name_of(*at) == name) own.erase(at);
}

std::span<const GgufPlace> GgufTensorTable::layer(int64_t index) const {
  const auto own = layers_.find(gguf_layer_prefix(index));
  return own == layers_.end() ? std::span<const GgufPlace>() : own->second;
}

GgufPlace GgufTensorTable::find(int64_t index, std::string_view rest) const {
  const std::span<const GgufPlace> own = layer(index);
  const size_t prefix = gguf_layer_prefix(index).size();
  const auto rest_of = [prefix](const GgufPlace& place) { return name_of(place).substr(prefix); };
  const auto at = std::ranges::lower_bound(own, rest, {}, rest_of);
  return at != own.end() && rest_of(*at) == rest ? *at : GgufPlace();
}

GgufPlace GgufTensorTable::find_of_experts(int64_t index) const {
  const size_t prefix = gguf_layer_prefix(index).size();
  for (const GgufPlace& place : layer(index)) {
    if (belongs_to_experts(name_of(place).substr(prefix))) return place;
  }
  return {};
}

}  // namespace conclave::inline v0::checkpoint
