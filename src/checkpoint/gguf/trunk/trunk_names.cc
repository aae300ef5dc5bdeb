#include "checkpoint/gguf/trunk/trunk_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kFileLayers = "blk.";
constexpr std::array<std::string_view, 2> kEndings = {".weight", ".bias"};

// A name without its ending and without what says the layer.
struct NameParts {
  std::string_view stem;
  TrunkPlace place;
};

NameParts parts_of(std::string_view name, std::string_view layers) {
  NameParts parts{.stem = name, .place = {}};
  for (const std::string_view ending : kEndings) {
    if (!parts.stem.ends_with(ending)) continue;
    parts.place.ending = parts.stem.substr(parts.stem.size() - ending.size());
    parts.stem.remove_suffix(ending.size());
    break;
  }
  if (!parts.stem.starts_with(layers)) return parts;
  const std::string_view after = parts.stem.substr(layers.size());
  int64_t layer = 0;
  const auto [end, problem] = std::from_chars(after.data(), after.data() + after.size(), layer);
  if (problem != std::errc() || end == after.data() + after.size() || *end != '.') return parts;
  parts.place.layer = layer;
  parts.stem = after.substr(static_cast<size_t>(end - after.data()) + 1);
  return parts;
}

template <class Matches>
void add_rows(const TrunkTable& table, const Matches& has_name, TrunkPlace& place) {
  const auto add = [&](std::span<const NamedTensor> rows) {
    for (const NamedTensor& row : rows) {
      if (has_name(row)) place.rows.push_back(&row);
    }
  };
  if (!place.layer) return add(table.once);
  std::ranges::for_each(table.layer, add);
}

}  // namespace

TrunkPlace find_by_directory_name(const TrunkTable& table, std::string_view name) {
  NameParts parts = parts_of(name, table.layers);
  add_rows(
      table,
      [&](const NamedTensor& row) {
        return row.directory == parts.stem && row.is_bare == parts.place.ending.empty();
      },
      parts.place);
  return std::move(parts.place);
}

TrunkPlace find_by_file_name(const TrunkTable& table, std::string_view name) {
  NameParts parts = parts_of(name, kFileLayers);
  if (!parts.place.ending.empty()) {
    add_rows(
        table, [&](const NamedTensor& row) { return row.file == parts.stem; }, parts.place);
  }
  return std::move(parts.place);
}

std::string file_name(const NamedTensor& row, const TrunkPlace& place) {
  const std::string_view ending = row.is_bare ? kEndings.front() : place.ending;
  if (!place.layer) return fmt::format("{}{}", row.file, ending);
  return fmt::format("{}{}.{}{}", kFileLayers, *place.layer, row.file, ending);
}

std::string directory_name(const TrunkTable& table, const NamedTensor& row,
                           const TrunkPlace& place) {
  const std::string_view ending = row.is_bare ? std::string_view() : place.ending;
  if (!place.layer) return fmt::format("{}{}", row.directory, ending);
  return fmt::format("{}{}.{}{}", table.layers, *place.layer, row.directory, ending);
}

}  // namespace conclave::inline v0::checkpoint
