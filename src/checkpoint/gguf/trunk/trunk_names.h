// Finds what a tensor of a trunk is called in the other container.
#pragma once

#include "checkpoint/gguf/trunk/trunk_table.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {

// A name's parts: the rows of the table that have it, the layer and the ending.
struct TrunkPlace {
  std::vector<const NamedTensor*> rows;  // none: the family has no such tensor
  std::optional<int64_t> layer;
  std::string_view ending;  // ".weight", ".bias" or none
};

TrunkPlace find_by_directory_name(const TrunkTable& table, std::string_view name);
TrunkPlace find_by_file_name(const TrunkTable& table, std::string_view name);

// Endings are those of the other container, ".weight" for a bare name.
std::string file_name(const NamedTensor& row, const TrunkPlace& place);
std::string directory_name(const TrunkTable& table, const NamedTensor& row,
                           const TrunkPlace& place);

}  // namespace conclave::inline v0::checkpoint
