#include "capi/guard.h"
#include "capi/sources.h"
#include "capi/structs.h"
#include "capi/values.h"

#include "conclave/error.h"

#include <span>

namespace conclave::inline v0::capi {
namespace {

static_assert(CONCLAVE_FILE_ACCESS_AUTO == static_cast<int32_t>(FileAccess::kAuto) &&
              CONCLAVE_FILE_ACCESS_MAP == static_cast<int32_t>(FileAccess::kMap) &&
              CONCLAVE_FILE_ACCESS_READ == static_cast<int32_t>(FileAccess::kRead) &&
              CONCLAVE_EXPERT_SET_TEXT == static_cast<int32_t>(ExpertSet::kText) &&
              CONCLAVE_EXPERT_SET_VISION == static_cast<int32_t>(ExpertSet::kVision));

CheckpointOptions checkpoint_options_of(const conclave_checkpoint_options& given) {
  constexpr uint32_t kKnown =
      CONCLAVE_CHECKPOINT_EXTRA_LAYERS | CONCLAVE_CHECKPOINT_VERIFY_MANIFEST;
  check_flags("options.flags", given.flags, kKnown);
  check_flags("options.reserved", given.reserved, 0);
  return {.access = choice_of("options.access", given.access, FileAccess::kRead),
          .experts = choice_of("options.experts", given.experts, ExpertSet::kVision),
          .extra_layers = (given.flags & CONCLAVE_CHECKPOINT_EXTRA_LAYERS) != 0,
          .verify_manifest = (given.flags & CONCLAVE_CHECKPOINT_VERIFY_MANIFEST) != 0};
}

const Checkpoint& checkpoint_of(const conclave_checkpoint* handle) {
  return *required(handle, "checkpoint").checkpoint;
}

const CheckpointLayer& layer_at(const Checkpoint& checkpoint, size_t position) {
  const std::span<const CheckpointLayer> layers = checkpoint.layers();
  if (position < layers.size()) return layers[position];
  throw Error(ErrorCode::kLayerNotFound, {.what = "the model has fewer MoE layers",
                                          .tensor = "position",
                                          .found = std::to_string(position),
                                          .limit = std::to_string(layers.size()) + " layers"});
}

}  // namespace

std::shared_ptr<const WeightSource> source_of(std::shared_ptr<const Checkpoint> checkpoint,
                                              int64_t index) {
  struct Held {
    std::shared_ptr<const Checkpoint> checkpoint;
    std::unique_ptr<WeightSource> source;
  };
  std::unique_ptr<WeightSource> source = checkpoint->layer_source(index);
  auto held = std::make_shared<Held>(Held{std::move(checkpoint), std::move(source)});
  const WeightSource* const in_it = held->source.get();
  return {std::move(held), in_it};
}

}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_checkpoint_open(const char* path,
                                         const conclave_checkpoint_options* options,
                                         conclave_checkpoint** out) noexcept {
  return capi::guarded([&] {
    const char* const of = &capi::required(path, "path");
    capi::required(out, "out");
    const conclave_checkpoint_options given = capi::take_optional(options, "options");
    capi::hand_out(out, std::make_shared<const conclave::Checkpoint>(
                            conclave::Checkpoint::open(of, capi::checkpoint_options_of(given))));
  });
}

void conclave_checkpoint_destroy(conclave_checkpoint* checkpoint) noexcept { delete checkpoint; }

conclave_status conclave_checkpoint_get_info(const conclave_checkpoint* checkpoint,
                                             conclave_checkpoint_info* info) noexcept {
  return capi::guarded([&] {
    const conclave::Checkpoint& from = capi::checkpoint_of(checkpoint);
    capi::fill(capi::fillable(info, "info"), {.struct_size = 0,
                                              .num_layers = from.layers().size(),
                                              .num_hidden_layers = from.num_hidden_layers(),
                                              .bytes = from.total_bytes(),
                                              .parameters = from.total_parameters(),
                                              .model_type = from.model_type().c_str(),
                                              .architecture = from.architecture().c_str()});
  });
}

conclave_status conclave_checkpoint_get_layer(const conclave_checkpoint* checkpoint,
                                              size_t position, conclave_layer_info* info) noexcept {
  return capi::guarded([&] {
    const conclave::Checkpoint& from = capi::checkpoint_of(checkpoint);
    conclave_layer_info* const to = capi::fillable(info, "info");
    const conclave::CheckpointLayer& layer = capi::layer_at(from, position);
    capi::fill(to, {.struct_size = 0,
                    .index = layer.index,
                    .bytes = layer.bytes,
                    .prefix = layer.prefix.c_str(),
                    .layout = layer.layout.c_str(),
                    .reason = layer.support.reason().c_str()});
  });
}

conclave_status conclave_checkpoint_spec(const conclave_checkpoint* checkpoint, int64_t index,
                                         conclave_spec** out) noexcept {
  return capi::guarded([&] {
    const conclave::Checkpoint& from = capi::checkpoint_of(checkpoint);
    capi::required(out, "out");
    capi::hand_out(out, from.layer(index).spec);
  });
}

conclave_status conclave_checkpoint_source(const conclave_checkpoint* checkpoint, int64_t index,
                                           conclave_source** out) noexcept {
  return capi::guarded([&] {
    const conclave_checkpoint& from = capi::required(checkpoint, "checkpoint");
    capi::required(out, "out");
    capi::hand_out(out, capi::source_of(from.checkpoint, index));
  });
}
