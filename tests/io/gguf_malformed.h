// Hand-made GGUF files that break one rule each.
#pragma once

#include "conclave/error.h"

#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {

struct MalformedGguf {
  std::string name;
  std::string file;
  ErrorCode code;  // the only one it may be refused with
};
using GgufCases = std::vector<MalformedGguf>;

// What stands before the list of tensors: the start, counts, keys and their values.
void add_malformed_entries(GgufCases& cases);
// The list of tensors and the data.
void add_malformed_tensors(GgufCases& cases);

// Texts that are no keys and no names.
const std::vector<std::pair<std::string, std::string>>& gguf_bad_texts();

}  // namespace conclave::testing
