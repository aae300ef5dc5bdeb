#include "core/workspace_layout.h"

#include "core/checked.h"

#include "conclave/error.h"

namespace conclave::inline v0 {

WorkspaceSlice WorkspaceLayout::book_bytes(int64_t count, size_t element_bytes) {
  const auto bytes =
      count < 0 ? std::nullopt : checked_mul(static_cast<size_t>(count), element_bytes);
  const auto padded = bytes ? checked_add(*bytes, kWorkspaceAlignment - 1) : std::nullopt;
  const size_t rounded = padded ? *padded / kWorkspaceAlignment * kWorkspaceAlignment : 0;
  const auto end = padded ? checked_add(total_, rounded) : std::nullopt;
  if (!end || *end > static_cast<size_t>(INT64_MAX)) {
    throw Error(ErrorCode::kSizeOverflow, {.what = "a workspace does not fit 63 bits",
                                           .found = std::to_string(count) + " elements of " +
                                                    std::to_string(element_bytes) + " bytes"});
  }
  const WorkspaceSlice slice{total_, *bytes};
  total_ = *end;
  return slice;
}

}  // namespace conclave::inline v0
