// Visits every value of a document through every getter.
#pragma once

#include "fuzz/promises.h"
#include "io/json.h"

#include <cstddef>
#include <string_view>

namespace conclave::testing {

// Returns the number of values; `budget` limits the paths requested, each of which costs a walk.
inline size_t walk_json(const io::JsonValue& value, size_t& budget) {
  if (budget > 0) {
    --budget;
    promise(value.path().size() < 1'000'000);
    expect_value_or_error([&] { value.as_int64(); });
    expect_value_or_error([&] { value.as_double(); });
    expect_value_or_error([&] { value.as_bool(); });
  }
  size_t values = 1;
  switch (value.type()) {
    case io::JsonType::kString:
      promise(!io::find_invalid_utf8(value.as_string()));
      break;
    case io::JsonType::kArray:
      for (const io::JsonValue item : value.items()) values += walk_json(item, budget);
      break;
    case io::JsonType::kObject:
      for (const auto& [key, member] : value.members()) {
        promise(!io::find_invalid_utf8(key));
        const auto found = value.find(key);
        promise(found.has_value() && found->type() == member.type());
        values += walk_json(member, budget);
      }
      break;
    default:
      break;
  }
  return values;
}

}  // namespace conclave::testing
