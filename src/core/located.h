// Where a weight lies, as WeightSource::locate says it, in the fields of an error.
#pragma once

#include "conclave/error.h"

#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0 {

// The detail with the file and the tensor of "FILE: TENSOR"; a text without a file is the tensor.
inline ErrorDetail located(std::string_view place, ErrorDetail detail) {
  constexpr std::string_view kSeparator = ": ";
  const size_t at = place.rfind(kSeparator);
  if (at != std::string_view::npos) {
    detail.file = place.substr(0, at);
    place.remove_prefix(at + kSeparator.size());
  }
  detail.tensor = place;
  return detail;
}

}  // namespace conclave::inline v0
