#include "checkpoint/model_config.h"
#include "fuzz/harness.h"
#include "fuzz/json_walk.h"
#include "fuzz/promises.h"
#include "io/json.h"

namespace conclave::testing {

void fuzz_config(std::span<const std::byte> input) {
  expect_value_or_error([&] {
    const io::JsonDocument document =
        io::JsonDocument::parse(input, "fuzz.config.json", io::kConfigLimits);
    size_t budget = 32;
    promise(walk_json(document.root(), budget) >= 1);
    const checkpoint::ModelConfig config = checkpoint::read_model_config(document.root());
    promise(config.architecture != nullptr);
    promise(config.num_hidden_layers <= checkpoint::kMaxHiddenLayers);
    for (const checkpoint::LayerConfig& layer : config.layers) {
      promise(layer.index >= 0 && layer.index < config.num_hidden_layers);
      promise(layer.spec.num_experts > 0 && layer.spec.num_experts <= checkpoint::kMaxExperts);
      promise(layer.spec.hidden_size > 0 && layer.spec.hidden_size <= checkpoint::kMaxWidth);
    }
  });
}

}  // namespace conclave::testing
