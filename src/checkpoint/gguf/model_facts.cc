#include "checkpoint/gguf/model_facts.h"

#include "checkpoint/gguf/spec.h"
#include "io/text.h"
#include "spec/layer_weights.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <string_view>
#include <vector>

namespace conclave::inline v0::checkpoint {
namespace {

// No model has more layers; the bound keeps the work on a hostile file small.
constexpr int64_t kMaxLayers = 4096;

const GgufFamily& family_of(const GgufKeys& keys, const std::string& file) {
  if (const GgufFamily* family = find_gguf_family(keys.architecture())) return *family;
  std::vector<std::string_view> names;
  for (const GgufFamily& family : gguf_families()) names.push_back(family.name);
  throw Error(ErrorCode::kUnknownArchitecture,
              {.what = "the architecture is not known to have experts",
               .file = file,
               .tensor = "general.architecture",
               .expected = fmt::format("one of {}", fmt::join(names, ", ")),
               .found = io::show_text(keys.architecture())});
}

}  // namespace

GgufModel::GgufModel(const io::GgufHeader& header, const std::string& file)
    : keys(header, file), family(family_of(keys, file)) {
  num_blocks = keys.size("block_count", std::nullopt, {.low = 1, .high = kMaxLayers});
  num_hidden_layers =
      num_blocks - keys.size("nextn_predict_layers", 0, {.low = 0, .high = num_blocks - 1});
  sizes = read_gguf_sizes(keys, family);
}

CheckpointLayer describe_gguf_layer(const GgufModel& model, const GgufLayer& layer,
                                    const GgufForm& form) {
  CheckpointLayer described;
  described.index = layer.index;
  described.prefix = layer.prefix;
  described.layout = layer.layout;
  described.bytes = layer.bytes;
  described.spec = read_gguf_spec(model.keys, model.family, layer, form, described.support);
  described.parameters = count_weights(described.spec);
  return described;
}

}  // namespace conclave::inline v0::checkpoint
