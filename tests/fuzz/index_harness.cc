#include "fuzz/harness.h"
#include "fuzz/json_walk.h"
#include "fuzz/promises.h"
#include "io/directory.h"
#include "io/json.h"

namespace conclave::testing {

void fuzz_index(std::span<const std::byte> input) {
  expect_value_or_error([&] {
    const io::JsonDocument document =
        io::JsonDocument::parse(input, "fuzz.index.json", io::kIndexLimits);
    size_t budget = 32;
    promise(walk_json(document.root(), budget) >= 1);
    for (const auto& [tensor, shard] : document.root().at("weight_map").members()) {
      const std::string_view name = shard.as_string();
      io::check_shard_name(name, document.root().file());
      promise(name.find_first_of("/\\") == std::string_view::npos && name != "..");
      promise(name.ends_with(".safetensors"));
    }
  });
}

}  // namespace conclave::testing
