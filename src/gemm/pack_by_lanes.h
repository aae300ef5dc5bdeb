// pack_panel by vector code that transposes lanes of 32 bits, codes and numbers of groups alike:
// the same bytes, several times faster where the columns come from memory.
#pragma once

#include "gemm/packed_layout.h"

#include <cstddef>

namespace conclave::inline v0::gemm {

// `next`: the columns that will be packed after these, null for unknown ones, which are fetched
// meanwhile.
UnfitNumber pack_panel_by_lanes(const PanelLayout& layout, const PanelColumns& columns,
                                const PanelColumns& next, const PackFunctions& functions,
                                std::byte* panel, const PanelNumbers& scales,
                                const PanelNumbers& offsets);

}  // namespace conclave::inline v0::gemm
