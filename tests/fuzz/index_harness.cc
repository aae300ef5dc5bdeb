#include "checkpoint/weight_map.h"
#include "fuzz/harness.h"
#include "fuzz/json_walk.h"
#include "fuzz/promises.h"
#include "io/json.h"

#include <string>

namespace conclave::testing {

void fuzz_index(std::span<const std::byte> input) {
  expect_value_or_error([&] {
    const io::JsonDocument document =
        io::JsonDocument::parse(input, "fuzz.index.json", io::kIndexLimits);
    size_t budget = 32;
    promise(walk_json(document.root(), budget) >= 1);
    for (const std::string& name : checkpoint::read_weight_map(document).shards) {
      promise(name.find_first_of("/\\") == std::string::npos && name != "..");
      promise(name.ends_with(".safetensors"));
    }
  });
}

}  // namespace conclave::testing
