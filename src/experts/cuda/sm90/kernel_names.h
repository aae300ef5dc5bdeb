// Names of a kernel whose code serves several rows of the catalog.
#pragma once

#include <string_view>

namespace conclave::inline v0::experts {

struct KernelNames {
  std::string_view row;  // "cuda.tile_int8_sm90"
  std::string_view up;   // launches of the two products: "experts.tile_int8_sm90.up"
  std::string_view down;
};

}  // namespace conclave::inline v0::experts
