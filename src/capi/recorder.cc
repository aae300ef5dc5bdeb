#include "capi/guard.h"
#include "capi/record.h"
#include "capi/structs.h"
#include "capi/tensors.h"
#include "capi/values.h"

#include "conclave/error.h"

#include <string>

namespace conclave::inline v0::capi {
namespace {

static_assert(CONCLAVE_WHEN_FULL_DROP_OLDEST == static_cast<int32_t>(WhenFull::kDropOldest) &&
              CONCLAVE_WHEN_FULL_DROP_NEWEST == static_cast<int32_t>(WhenFull::kDropNewest) &&
              CONCLAVE_WHEN_FULL_ERROR == static_cast<int32_t>(WhenFull::kError));

// Layers are numbered below it, and each comes once.
constexpr size_t kMostLayers = 65536;

}  // namespace

std::vector<RecordedLayer> recorded_layers_of(const int64_t* layers,
                                              const conclave_spec* const* specs, size_t count) {
  const auto numbers = array_of(layers, count, "layers", "num_layers", kMostLayers);
  const auto handles = array_of(specs, count, "specs", "num_layers", kMostLayers);
  std::vector<RecordedLayer> recorded;
  for (size_t i = 0; i < count; ++i) {
    const std::string place = "specs[" + std::to_string(i) + "]";
    recorded.push_back(RecordedLayer::of(numbers[i], required(handles[i], place.c_str()).spec));
  }
  return recorded;
}

RecorderOptions recorder_options_of(const conclave_recorder_options* options) {
  const conclave_recorder_options given = take_optional(options, "options");
  check_choice("options.reserved", given.reserved, 0);
  RecorderOptions result{
      .when_full = choice_of("options.when_full", given.when_full, WhenFull::kError),
      .model = text_of(given.model),
      .model_type = text_of(given.model_type)};
  if (given.capacity != 0) result.capacity = given.capacity;
  return result;
}

std::vector<TokenKey> keys_of(const conclave_token_key* tokens, size_t count) {
  std::vector<TokenKey> keys;
  for (const conclave_token_key& key : array_of(tokens, count, "tokens", "num_tokens", kMostKeys)) {
    keys.push_back({.sequence = key.sequence, .position = key.position});
  }
  return keys;
}

}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_recorder_create(const int64_t* layers, const conclave_spec* const* specs,
                                         size_t num_layers,
                                         const conclave_recorder_options* options,
                                         conclave_recorder** out) noexcept {
  return capi::guarded([&] {
    capi::required(out, "out");
    const auto recorded = capi::recorded_layers_of(layers, specs, num_layers);
    capi::hand_out(out, conclave::RoutingRecorder(recorded, capi::recorder_options_of(options)));
  });
}

void conclave_recorder_destroy(conclave_recorder* recorder) noexcept { delete recorder; }

conclave_status conclave_recorder_record(conclave_recorder* recorder, int64_t layer,
                                         const conclave_tensor* topk_ids,
                                         const conclave_tensor* topk_weights,
                                         const conclave_token_key* tokens,
                                         size_t num_tokens) noexcept {
  return capi::guarded([&] {
    conclave::RoutingRecorder& to = capi::required(recorder, "recorder").recorder;
    const conclave::ConstTensorView ids = capi::needed_view(topk_ids, "topk_ids");
    const conclave::ConstTensorView weights = capi::needed_view(topk_weights, "topk_weights");
    if (tokens == nullptr && num_tokens == 0) return to.record(layer, ids, weights);
    const auto keys = capi::keys_of(tokens, num_tokens);
    // Without keys rows would be numbered, which is not what was asked for.
    if (keys.empty() && ids.shape.rank() > 0 && ids.shape[0] > 0) {
      throw conclave::Error(conclave::ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                                          .tensor = "tokens",
                                                          .expected = std::to_string(ids.shape[0]),
                                                          .found = "0"});
    }
    to.record(layer, ids, weights, keys);
  });
}

conclave_status conclave_recorder_counts(const conclave_recorder* recorder, int64_t layer,
                                         int64_t* recorded, int64_t* dropped) noexcept {
  return capi::guarded([&] {
    capi::tell_counts(capi::required(recorder, "recorder").recorder, layer, recorded, dropped);
  });
}

conclave_status conclave_recorder_write(const conclave_recorder* recorder,
                                        const char* path) noexcept {
  return capi::guarded([&] {
    const conclave::RoutingRecorder& from = capi::required(recorder, "recorder").recorder;
    from.write(&capi::required(path, "path"));
  });
}

conclave_status conclave_recorder_clear(conclave_recorder* recorder) noexcept {
  return capi::guarded([&] { capi::required(recorder, "recorder").recorder.clear(); });
}
