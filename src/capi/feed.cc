#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/structs.h"
#include "capi/tensors.h"
#include "capi/values.h"

#include "conclave/error.h"

#include <algorithm>
#include <span>
#include <string>

namespace conclave::inline v0::capi {
namespace {

static_assert(CONCLAVE_FEED_MEMORY_COPY == static_cast<int32_t>(FeedMemory::kCopy) &&
              CONCLAVE_FEED_MEMORY_KEEP == static_cast<int32_t>(FeedMemory::kKeep));

FeedState& state_of(const conclave_feed* handle) { return *required(handle, "feed").state; }

std::span<const int64_t> layers_of(const int64_t* layers, size_t count) {
  constexpr size_t kMostLayers = 65536;
  return array_of(layers, count, "layers", "num_layers", kMostLayers);
}

CheckpointFeed feed_of(const MoeSpec& spec, const char* model_type, std::span<const int64_t> layers,
                       const char* quantization) {
  if (quantization == nullptr) return CheckpointFeed::from_spec(spec, model_type, layers);
  return CheckpointFeed::from_spec(spec, model_type, layers, quantization);
}

// Shares the feed, and is known to it for as long as it lives.
std::shared_ptr<const WeightSource> source_in(const std::shared_ptr<FeedState>& state,
                                              int64_t layer) {
  struct Held {
    std::shared_ptr<FeedState> state;
    std::unique_ptr<WeightSource> source;
  };
  auto held = std::make_shared<Held>(Held{state, state->feed.layer_source(layer)});
  const WeightSource* const source = held->source.get();
  std::shared_ptr<const WeightSource> shared(std::move(held), source);
  std::erase_if(state->sources, [](const auto& entry) { return entry.second.expired(); });
  state->sources.emplace_back(layer, shared);
  return shared;
}

void release(FeedState& state, int64_t layer) {
  for (const auto& [other, source] : state.sources) {
    if (other != layer || source.expired()) continue;
    throw Error(ErrorCode::kState, {.what = "a source of this layer lives",
                                    .tensor = "layer",
                                    .found = std::to_string(layer),
                                    .hint = "end the source, and layers that read it in place"});
  }
  state.feed.release(layer);
}

GgufTensorView gguf_view(uint32_t type, const int64_t* shape, int32_t rank, const void* data,
                         size_t bytes) {
  if (rank < 0 || rank > kMaxRank) {
    throw Error(ErrorCode::kShape, {.what = "a tensor has another number of axes",
                                    .tensor = "rank",
                                    .found = std::to_string(rank),
                                    .limit = "0 to " + std::to_string(kMaxRank)});
  }
  if (rank > 0) required(shape, "shape");
  if (bytes > 0 && data == nullptr) throw_null("data");
  return {.type = type,
          .shape = Shape(std::span(shape, static_cast<size_t>(rank))),
          .bytes = {static_cast<const std::byte*>(data), bytes}};
}

void say(int32_t* used, bool value) {
  if (used != nullptr) *used = value ? 1 : 0;
}

std::string lines_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : "\n") + name;
  return text;
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_feed_from_config(const char* config_json, conclave_feed** out) noexcept {
  return capi::guarded([&] {
    const char* const text = &capi::required(config_json, "config_json");
    capi::required(out, "out");
    capi::hand_out(out,
                   std::make_shared<capi::FeedState>(conclave::CheckpointFeed::from_config(text)));
  });
}

conclave_status conclave_feed_from_spec(const conclave_spec* spec, const char* model_type,
                                        const int64_t* layers, size_t num_layers,
                                        const char* quantization, conclave_feed** out) noexcept {
  return capi::guarded([&] {
    const conclave::MoeSpec& of = capi::required(spec, "spec").spec;
    const char* const type = &capi::required(model_type, "model_type");
    capi::required(out, "out");
    capi::hand_out(out, std::make_shared<capi::FeedState>(capi::feed_of(
                            of, type, capi::layers_of(layers, num_layers), quantization)));
  });
}

conclave_status conclave_feed_from_gguf(const void* header, size_t bytes,
                                        conclave_feed** out) noexcept {
  return capi::guarded([&] {
    const auto* const data = static_cast<const std::byte*>(header);
    capi::required(data, "header");
    capi::required(out, "out");
    capi::hand_out(out, std::make_shared<capi::FeedState>(
                            conclave::CheckpointFeed::from_gguf(std::span(data, bytes))));
  });
}

conclave_status conclave_feed_put(conclave_feed* feed, const char* name,
                                  const conclave_tensor* tensor, conclave_feed_memory memory,
                                  int32_t* used) noexcept {
  return capi::guarded([&] {
    capi::FeedState& state = capi::state_of(feed);
    const char* const of = &capi::required(name, "name");
    capi::check_aligned("used", used, alignof(int32_t));
    const auto keep = capi::choice_of("memory", memory, conclave::FeedMemory::kKeep);
    capi::say(used, state.feed.put(of, capi::needed_view(tensor, of), keep));
  });
}

conclave_status conclave_feed_put_gguf(conclave_feed* feed, const char* name, uint32_t type,
                                       const int64_t* shape, int32_t rank, const void* data,
                                       size_t bytes, conclave_feed_memory memory,
                                       int32_t* used) noexcept {
  return capi::guarded([&] {
    capi::FeedState& state = capi::state_of(feed);
    const char* const of = &capi::required(name, "name");
    capi::check_aligned("used", used, alignof(int32_t));
    const auto keep = capi::choice_of("memory", memory, conclave::FeedMemory::kKeep);
    capi::say(used, state.feed.put(of, capi::gguf_view(type, shape, rank, data, bytes), keep));
  });
}

conclave_status conclave_feed_num_layers(const conclave_feed* feed, size_t* num_layers) noexcept {
  return capi::guarded([&] {
    const capi::FeedState& state = capi::state_of(feed);
    capi::required(num_layers, "num_layers") = state.feed.layers().size();
  });
}

conclave_status conclave_feed_layer_at(const conclave_feed* feed, size_t position,
                                       int64_t* layer) noexcept {
  return capi::guarded([&] {
    const std::span<const int64_t> layers = capi::state_of(feed).feed.layers();
    int64_t& to = capi::required(layer, "layer");
    if (position >= layers.size()) {
      throw conclave::Error(conclave::ErrorCode::kLayerNotFound,
                            {.what = "the model has fewer MoE layers",
                             .tensor = "position",
                             .found = std::to_string(position),
                             .limit = std::to_string(layers.size()) + " layers"});
    }
    to = layers[position];
  });
}

conclave_status conclave_feed_is_complete(const conclave_feed* feed, int64_t layer,
                                          int32_t* complete) noexcept {
  return capi::guarded([&] {
    const capi::FeedState& state = capi::state_of(feed);
    int32_t& to = capi::required(complete, "complete");
    to = state.feed.is_complete(layer) ? 1 : 0;
  });
}

conclave_status conclave_feed_missing(const conclave_feed* feed, size_t limit,
                                      char** names) noexcept {
  return capi::guarded([&] {
    const capi::FeedState& state = capi::state_of(feed);
    char*& to = capi::required(names, "names");
    to = capi::copy_text(capi::lines_of(state.feed.missing(limit)));
  });
}

conclave_status conclave_feed_spec(const conclave_feed* feed, int64_t layer,
                                   conclave_spec** out) noexcept {
  return capi::guarded([&] {
    const capi::FeedState& state = capi::state_of(feed);
    capi::required(out, "out");
    capi::hand_out(out, state.feed.layer(layer).spec);
  });
}

conclave_status conclave_feed_source(const conclave_feed* feed, int64_t layer,
                                     conclave_source** out) noexcept {
  return capi::guarded([&] {
    const conclave_feed& from = capi::required(feed, "feed");
    capi::required(out, "out");
    capi::hand_out(out, capi::source_in(from.state, layer));
  });
}

conclave_status conclave_feed_release(conclave_feed* feed, int64_t layer) noexcept {
  return capi::guarded([&] { capi::release(capi::state_of(feed), layer); });
}

void conclave_feed_destroy(conclave_feed* feed) noexcept { delete feed; }
