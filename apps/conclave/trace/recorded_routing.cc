#include "trace/recorded_routing.h"

#include "choices.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

namespace conclave::tool {
namespace {

// Records may know fewer ids than the layer: those of a program that has no zero experts.
void check_same_sizes(const RoutingRecord& record, const RecordedLayer& own) {
  const RecordedRows* const rows = record.find(own.layer);
  if (rows == nullptr) return;
  const RecordedLayer& recorded = rows->layer;
  if (recorded.num_slots == own.num_slots && recorded.num_ids <= own.num_ids) return;
  const auto sizes = [](const RecordedLayer& layer) {
    return std::to_string(layer.num_slots) + " of " + std::to_string(layer.num_ids) + " experts";
  };
  throw Error(ErrorCode::kShape,
              {.what = "the record is of another model, by layer " + std::to_string(own.layer) +
                       (record.model.empty() ? "" : "; it says " + record.model),
               .tensor = "--replay",
               .expected = sizes(own),
               .found = sizes(recorded)});
}

}  // namespace

std::vector<TokenKey> numbered_tokens(int64_t num_tokens) {
  std::vector<TokenKey> tokens;
  for (int64_t token = 0; token < num_tokens; ++token) tokens.push_back({.position = token});
  return tokens;
}

void check_record(const RoutingRecord& record, const std::string& file, int64_t layer,
                  const MoeSpec& spec) {
  const std::string of_model =
      record.model_type.empty() ? "" : fmt::format(", of a {} model", record.model_type);
  const RecordedRows* const rows = record.find(layer);
  if (rows == nullptr) {
    throw Error(ErrorCode::kLayerNotFound,
                {.what = "the record lacks a layer of the model",
                 .file = file,
                 .tensor = fmt::format("layer {}", layer),
                 .found = fmt::format("{} layers{}", record.layers.size(), of_model)});
  }
  const RecordedLayer expected = RecordedLayer::of(layer, spec);
  const RecordedLayer& found = rows->layer;
  // A record by hooks knows no hash, and may count fewer ids: those of zero experts are then none.
  const bool knows_ids = found.spec_hash != 0 && expected.spec_hash != 0;
  if (found.num_slots == expected.num_slots && found.num_ids <= expected.num_ids &&
      (found.num_ids == expected.num_ids || !knows_ids)) {
    return;
  }
  const auto text = [](const RecordedLayer& of) {
    return fmt::format("{} of {} experts a token", of.num_slots, of.num_ids);
  };
  throw Error(ErrorCode::kShape, {.what = "the record is of another model",
                                  .file = file,
                                  .tensor = fmt::format("layer {}", layer),
                                  .expected = text(expected),
                                  .found = text(found) + of_model});
}

bool ReplayedLayer::keeps_weights(const MoeSpec& spec) { return !router_weighs_shared(spec); }

ReplayedLayer::ReplayedLayer(const RoutingReplay& replay, int64_t layer, const MoeSpec& spec,
                             int64_t num_tokens)
    : ids_(DType::kI32, {num_tokens, num_slots(spec)}) {
  check_same_sizes(replay.record(), RecordedLayer::of(layer, spec));
  if (keeps_weights(spec)) weights_ = Tensor(DType::kF32, {num_tokens, num_slots(spec)});
  replay.find(layer, numbered_tokens(num_tokens), ids_.view(), weights_.view());
}

void ReplayedLayer::apply(LayerInput& input) const {
  input.topk_ids = ids_.view();
  input.topk_weights = weights_.view();
}

RoutingFile::RoutingFile(std::filesystem::path path, std::span<const RecordedLayer> layers,
                         int64_t num_tokens, std::string model, std::string model_type)
    : path_(std::move(path)),
      recorder_(layers, {.capacity = std::max<int64_t>(num_tokens, 1),
                         .when_full = WhenFull::kError,
                         .model = std::move(model),
                         .model_type = std::move(model_type)}) {
  const std::filesystem::path folder = path_.parent_path();
  if (folder.empty() || std::filesystem::is_directory(folder)) return;
  throw Error(ErrorCode::kFileWrite, {.what = "the file's directory is not there",
                                      .file = path_.string(),
                                      .hint = "create it first"});
}

void RoutingFile::add(int64_t layer, const LayerRun& run) {
  const int64_t rows = run.topk_ids.shape()[0];
  recorder_.record(layer, run.topk_ids.view(), run.topk_weights.view(), numbered_tokens(rows));
}

}  // namespace conclave::tool
