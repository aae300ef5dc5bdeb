// JSON that callers are given.
#pragma once

#include "capi/values.h"

#include <nlohmann/json.hpp>

namespace conclave::inline v0::capi {

// Members keep the order in which they are set.
using Json = nlohmann::ordered_json;

// A text that conclave_text_free frees. Bytes of names that are not UTF-8 become U+FFFD.
inline char* copy_json(const Json& json) {
  return copy_text(json.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace conclave::inline v0::capi
