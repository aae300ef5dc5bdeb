#include "experts/cuda/device_experts.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <charconv>
#include <optional>

namespace conclave::inline v0::experts {
namespace {

constexpr std::string_view kSortedRows = ", sorted rows";

// Takes a number off the front of `text`.
std::optional<int32_t> take_number(std::string_view& text) {
  int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

// "128x256x128B": the three sizes that every tile has.
bool take_sizes(std::string_view& text, DeviceTile& tile) {
  const auto tokens = take_number(text);
  if (!tokens || !take(text, "x")) return false;
  const auto features = take_number(text);
  if (!features || !take(text, "x")) return false;
  const auto depth = take_number(text);
  if (!depth || !take(text, "B")) return false;
  tile.tokens = *tokens;
  tile.features = *features;
  tile.depth = *depth;
  return true;
}

}  // namespace

std::string to_string(const DeviceTile& tile) {
  std::string text =
      fmt::format("{}x{}x{}B, {} stages", tile.tokens, tile.features, tile.depth, tile.stages);
  if (tile.cluster > 1) text += fmt::format(", cluster {}", tile.cluster);
  if (tile.blocks_per_sm > 1)
    text += fmt::format(", {} blocks a multiprocessor", tile.blocks_per_sm);
  if (tile.sorted_input) text += kSortedRows;
  return text;
}

DeviceTile parse_tile(std::string_view text) {
  const std::string_view whole = text;
  DeviceTile tile;
  bool good = take_sizes(text, tile);
  while (good && !text.empty()) {
    if (text == kSortedRows) {
      tile.sorted_input = true;
      break;
    }
    good = take(text, ", ");
    const bool is_cluster = good && take(text, "cluster ");
    const std::optional<int32_t> value = good ? take_number(text) : std::nullopt;
    good = value.has_value();
    if (!good) break;
    if (is_cluster) {
      tile.cluster = *value;
    } else if (take(text, " stages")) {
      tile.stages = *value;
    } else {
      good = take(text, " blocks a multiprocessor");
      tile.blocks_per_sm = *value;
    }
  }
  if (good) return tile;
  throw Error(ErrorCode::kInvalidArgument, {.what = "not the name of a tile",
                                            .expected = "such as 128x256x128B, 4 stages, cluster 2",
                                            .found = std::string(whole)});
}

}  // namespace conclave::inline v0::experts
