#include "checkpoint/lora/lora_names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <span>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr std::string_view kPrefix = "base_model.model.";
constexpr std::string_view kSuffixA = ".lora_A.weight";
constexpr std::string_view kSuffixB = ".lora_B.weight";
// The MoE block of a layer, by the families' names for it.
constexpr std::array<std::string_view, 6> kBlocks = {
    "mlp", "block_sparse_moe", "feed_forward", "moe", "ffn", "mixer"};
constexpr std::array<std::string_view, 4> kShared = {"shared_expert", "shared_experts",
                                                     "shared_mlp", "share_expert"};

struct Projection {
  std::string_view name;
  LoraMatrix matrix;
};
constexpr std::array kProjections = {
    Projection{"gate_proj", LoraMatrix::kGate},     Projection{"w1", LoraMatrix::kGate},
    Projection{"up_proj", LoraMatrix::kUp},         Projection{"w3", LoraMatrix::kUp},
    Projection{"down_proj", LoraMatrix::kDown},     Projection{"w2", LoraMatrix::kDown},
    Projection{"gate_up_proj", LoraMatrix::kGateUp}};

std::vector<std::string_view> split(std::string_view name) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t dot = name.find('.');
    parts.push_back(name.substr(0, dot));
    if (dot == std::string_view::npos) return parts;
    name.remove_prefix(dot + 1);
  }
}

std::optional<int64_t> number_of(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

std::optional<LoraMatrix> projection_of(std::string_view name) {
  for (const Projection& projection : kProjections) {
    if (projection.name == name) return projection.matrix;
  }
  return std::nullopt;
}

// `parts`: what follows the block's own name.
void place(std::span<const std::string_view> parts, LoraModule& module) {
  module.place = LoraPlace::kUnknown;
  if (parts.size() == 1 && parts[0] == "experts") module.place = LoraPlace::kStacked;
  const auto matrix = parts.empty() ? std::nullopt : projection_of(parts.back());
  if (!matrix) return;
  module.matrix = *matrix;
  if (parts.size() == 2 && contains(kShared, parts[0])) module.place = LoraPlace::kShared;
  if (parts.size() != 3 || parts[0] != "experts") return;
  const auto expert = number_of(parts[1]);
  if (!expert) return;
  module.place = LoraPlace::kExpert;
  module.expert = *expert;
}

}  // namespace

LoraModule parse_lora_module(std::string_view name) {
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  LoraModule module;
  std::vector<std::string_view> parts;
  for (const std::string_view part : split(name)) {
    if (part == "base_layer") {
      ++module.depth;
      continue;
    }
    module.name += (module.name.empty() ? "" : ".") + std::string(part);
    parts.push_back(part);
  }
  for (size_t at = 0; at + 2 < parts.size(); ++at) {
    const auto layer = parts[at] == "layers" ? number_of(parts[at + 1]) : std::nullopt;
    if (!layer) continue;
    module.layer = *layer;
    if (!contains(kBlocks, parts[at + 2])) break;
    place(std::span(parts).subspan(at + 3), module);
    break;
  }
  return module;
}

std::optional<LoraName> parse_lora_name(std::string_view tensor) {
  const bool is_b = tensor.ends_with(kSuffixB);
  if (!is_b && !tensor.ends_with(kSuffixA)) return std::nullopt;
  tensor.remove_suffix(kSuffixA.size());
  return LoraName{.module = parse_lora_module(tensor), .is_b = is_b};
}

}  // namespace conclave::inline v0
