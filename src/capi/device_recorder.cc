#include "capi/guard.h"
#include "capi/record.h"
#include "capi/structs.h"
#include "capi/tensors.h"

#include "conclave/c/device_record.h"
#include "conclave/device_routing_record.h"

#include <memory>

// Members are ended from the last to the first: the rings before what they use.
struct conclave_device_recorder {
  std::shared_ptr<conclave::capi::ContextState> context;
  conclave::DeviceRoutingRecorder recorder;
};

namespace capi = conclave::capi;

conclave_status conclave_device_recorder_create(const conclave_context* context,
                                                const int64_t* layers,
                                                const conclave_spec* const* specs,
                                                size_t num_layers,
                                                const conclave_recorder_options* options,
                                                conclave_device_recorder** out) noexcept {
  return capi::guarded([&] {
    const auto& state = capi::required(context, "context").state;
    capi::required(out, "out");
    const auto recorded = capi::recorded_layers_of(layers, specs, num_layers);
    capi::hand_out(out, state,
                   conclave::DeviceRoutingRecorder(*state->context, recorded,
                                                   capi::recorder_options_of(options)));
  });
}

void conclave_device_recorder_destroy(conclave_device_recorder* recorder) noexcept {
  delete recorder;
}

conclave_status conclave_device_recorder_record(conclave_device_recorder* recorder,
                                                const conclave_device_routing_rows* rows) noexcept {
  return capi::guarded([&] {
    conclave::DeviceRoutingRecorder& to = capi::required(recorder, "recorder").recorder;
    const conclave_device_routing_rows given = capi::take(rows, "rows");
    capi::check_aligned("num_tokens", given.num_tokens, alignof(int64_t));
    to.record(given.layer,
              {.topk_ids = capi::needed_view(given.topk_ids, "topk_ids"),
               .topk_weights = capi::needed_view(given.topk_weights, "topk_weights"),
               .tokens = capi::view_of(given.tokens, "tokens"),
               .num_tokens = given.num_tokens},
              conclave::Stream{given.stream});
  });
}

conclave_status conclave_device_recorder_counts(const conclave_device_recorder* recorder,
                                                int64_t layer, int64_t* recorded,
                                                int64_t* dropped) noexcept {
  return capi::guarded([&] {
    capi::tell_counts(capi::required(recorder, "recorder").recorder, layer, recorded, dropped);
  });
}

conclave_status conclave_device_recorder_write(const conclave_device_recorder* recorder,
                                               const char* path) noexcept {
  return capi::guarded([&] {
    const conclave::DeviceRoutingRecorder& from = capi::required(recorder, "recorder").recorder;
    from.write(&capi::required(path, "path"));
  });
}

conclave_status conclave_device_recorder_clear(conclave_device_recorder* recorder) noexcept {
  return capi::guarded([&] { capi::required(recorder, "recorder").recorder.clear(); });
}

conclave_status conclave_replay_from_device_recorder(const conclave_device_recorder* recorder,
                                                     conclave_replay** out) noexcept {
  return capi::guarded([&] {
    const conclave::DeviceRoutingRecorder& from = capi::required(recorder, "recorder").recorder;
    capi::required(out, "out");
    capi::hand_out(out, conclave::RoutingReplay(from.snapshot()));
  });
}
