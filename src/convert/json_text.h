// JSON as text.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace conclave::inline v0::conversion {

// Names need not be UTF-8: their other bytes become U+FFFD.
inline std::string json_text(const nlohmann::ordered_json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace conclave::inline v0::conversion
