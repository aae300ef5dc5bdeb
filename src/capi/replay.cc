#include "capi/guard.h"
#include "capi/json_text.h"
#include "capi/record.h"
#include "capi/structs.h"
#include "capi/tensors.h"
#include "capi/values.h"

#include "conclave/error.h"

#include <cmath>
#include <string>

namespace conclave::inline v0::capi {
namespace {

const RoutingReplay& replay_of(const conclave_replay* handle, const char* name = "replay") {
  return required(handle, name).replay;
}

Json json_of(const TokenKey& token) {
  return {{"sequence", token.sequence}, {"position", token.position}};
}

// JSON has no NaN: null stands for it.
Json json_of(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json json_of(const LayerDifferences& layer) {
  return {{"layer", layer.layer},
          {"compared", layer.compared},
          {"only_in_first", layer.only_in_first},
          {"only_in_second", layer.only_in_second},
          {"other_experts", layer.other_experts},
          {"reordered", layer.reordered},
          {"other_weights", layer.other_weights},
          {"worst_weight_difference", json_of(layer.worst_weight_difference)},
          {"worst_token", json_of(layer.worst_token)},
          {"same_spec", layer.same_spec}};
}

Json json_of(const RoutingDifference& token) {
  return {{"layer", token.layer},
          {"token", json_of(token.token)},
          {"first_ids", token.first_ids},
          {"second_ids", token.second_ids},
          {"weight_difference", json_of(token.weight_difference)}};
}

template <class Entry>
Json json_list_of(const std::vector<Entry>& entries) {
  Json list = Json::array();
  for (const Entry& entry : entries) list.push_back(json_of(entry));
  return list;
}

Json json_of(const RoutingComparison& comparison) {
  return {{"equal", comparison.equal()},
          {"layers", json_list_of(comparison.layers)},
          {"only_in_first", comparison.only_in_first},
          {"only_in_second", comparison.only_in_second},
          {"examples", json_list_of(comparison.examples)}};
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_replay_open(const char* path, conclave_replay** out) noexcept {
  return capi::guarded([&] {
    const char* const of = &capi::required(path, "path");
    capi::required(out, "out");
    capi::hand_out(out, conclave::RoutingReplay(conclave::RoutingRecord::open(of)));
  });
}

conclave_status conclave_replay_from_recorder(const conclave_recorder* recorder,
                                              conclave_replay** out) noexcept {
  return capi::guarded([&] {
    const conclave::RoutingRecorder& from = capi::required(recorder, "recorder").recorder;
    capi::required(out, "out");
    capi::hand_out(out, conclave::RoutingReplay(from.snapshot()));
  });
}

void conclave_replay_destroy(conclave_replay* replay) noexcept { delete replay; }

conclave_status conclave_replay_get_info(const conclave_replay* replay,
                                         conclave_replay_info* info) noexcept {
  return capi::guarded([&] {
    const conclave::RoutingRecord& from = capi::replay_of(replay).record();
    capi::fill(capi::fillable(info, "info"), {.struct_size = 0,
                                              .num_layers = from.layers.size(),
                                              .model = from.model.c_str(),
                                              .model_type = from.model_type.c_str()});
  });
}

conclave_status conclave_replay_get_layer(const conclave_replay* replay, size_t position,
                                          conclave_replay_layer* info) noexcept {
  return capi::guarded([&] {
    const auto& layers = capi::replay_of(replay).record().layers;
    conclave_replay_layer* const to = capi::fillable(info, "info");
    capi::check_position(conclave::ErrorCode::kLayerNotFound, position, layers.size(), "layers");
    const conclave::RecordedRows& rows = layers[position];
    capi::fill(to, {.struct_size = 0,
                    .layer = rows.layer.layer,
                    .num_slots = rows.layer.num_slots,
                    .num_ids = rows.layer.num_ids,
                    .num_tokens = rows.num_tokens(),
                    .dropped_tokens = rows.dropped_tokens,
                    .spec_hash = rows.layer.spec_hash});
  });
}

conclave_status conclave_replay_find(const conclave_replay* replay, int64_t layer,
                                     const conclave_token_key* tokens, size_t num_tokens,
                                     const conclave_tensor* topk_ids,
                                     const conclave_tensor* topk_weights) noexcept {
  return capi::guarded([&] {
    const conclave::RoutingReplay& from = capi::replay_of(replay);
    const auto keys = capi::keys_of(tokens, num_tokens);
    from.find(layer, keys, capi::view_of(topk_ids, "topk_ids"),
              capi::view_of(topk_weights, "topk_weights"));
  });
}

conclave_status conclave_replay_compare_json(const conclave_replay* first,
                                             const conclave_replay* second, int64_t most_examples,
                                             char** json) noexcept {
  return capi::guarded([&] {
    const conclave::RoutingReplay& one = capi::replay_of(first, "first");
    const conclave::RoutingReplay& other = capi::replay_of(second, "second");
    char*& to = capi::required(json, "json");
    if (most_examples < 0) {
      throw conclave::Error(conclave::ErrorCode::kInvalidArgument,
                            {.what = "a number of tokens is negative",
                             .tensor = "most_examples",
                             .found = std::to_string(most_examples),
                             .limit = "at least 0"});
    }
    to = capi::copy_json(
        capi::json_of(conclave::compare_routing(one.record(), other.record(), most_examples)));
  });
}
