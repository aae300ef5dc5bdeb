#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/json_text.h"
#include "capi/structs.h"
#include "capi/tensors.h"
#include "capi/values.h"

#include "conclave/error.h"
#include "conclave/lora.h"
#include "conclave/refit.h"

#include <string>

namespace conclave::inline v0::capi {
namespace {

static_assert(CONCLAVE_WEIGHT_MLP_ROUTED == static_cast<int32_t>(WeightMlp::kRouted) &&
              CONCLAVE_WEIGHT_MLP_SHARED == static_cast<int32_t>(WeightMlp::kShared) &&
              CONCLAVE_WEIGHT_MATRIX_GATE == static_cast<int32_t>(WeightMatrix::kGate) &&
              CONCLAVE_WEIGHT_MATRIX_UP == static_cast<int32_t>(WeightMatrix::kUp) &&
              CONCLAVE_WEIGHT_MATRIX_DOWN == static_cast<int32_t>(WeightMatrix::kDown));

// More than any layer has: experts times matrices times MLPs.
constexpr size_t kMostFactors = size_t{1} << 22;

LoraFactors factors_of(const conclave_lora_factors& given, const std::string& place) {
  const auto named = [&](const char* member) { return place + "." + member; };
  if (given.scale == 0) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "an adapter without a scale does nothing",
                                              .tensor = named("scale"),
                                              .expected = "lora_alpha / r",
                                              .found = "0"});
  }
  return {.mlp = choice_of(named("mlp").c_str(), given.mlp, WeightMlp::kShared),
          .matrix = choice_of(named("matrix").c_str(), given.matrix, WeightMatrix::kDown),
          .expert = given.expert,
          .a = needed_view(given.a, named("a").c_str()),
          .b = needed_view(given.b, named("b").c_str()),
          .scale = given.scale,
          .name = given.name == nullptr ? place : std::string(given.name)};
}

LoraAdapter adapter_of(const conclave_lora_adapter& given) {
  check_count("adapter.num_factors", given.num_factors, kMostFactors);
  LoraAdapter adapter{.name = text_of(given.name)};
  for (size_t i = 0; i < given.num_factors; ++i) {
    const std::string place = "adapter.factors[" + std::to_string(i) + "]";
    adapter.factors.push_back(
        factors_of(take_element(given.factors, i, "adapter.factors", place.c_str()), place));
  }
  return adapter;
}

Json json_of_adapters(const MoeLayer& layer) {
  Json list = Json::array();
  for (const AdapterInfo& info : layer.adapters()) {
    list.push_back({{"id", info.id},
                    {"name", info.name},
                    {"max_rank", info.max_rank},
                    {"num_factors", info.num_factors},
                    {"bytes", info.bytes}});
  }
  return list;
}

const LoraCheckpoint& lora_of(const conclave_lora_checkpoint* handle) {
  return required(handle, "checkpoint").checkpoint;
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_layer_add_adapter(conclave_layer* layer,
                                           const conclave_lora_adapter* adapter,
                                           int32_t* id) noexcept {
  return capi::guarded([&] {
    conclave::MoeLayer& to = capi::required(layer, "layer").layer;
    const conclave::LoraAdapter given = capi::adapter_of(capi::take(adapter, "adapter"));
    int32_t& number = capi::required(id, "id");
    number = to.add_adapter(given);
  });
}

conclave_status conclave_layer_remove_adapter(conclave_layer* layer, int32_t id) noexcept {
  return capi::guarded([&] { capi::required(layer, "layer").layer.remove_adapter(id); });
}

conclave_status conclave_layer_forget_graphs(conclave_layer* layer, size_t* bytes) noexcept {
  return capi::guarded([&] {
    const size_t given_back =
        conclave::GraphReplay::forget_graphs(capi::required(layer, "layer").layer);
    if (bytes != nullptr) *bytes = given_back;
  });
}

conclave_status conclave_layer_adapters_json(const conclave_layer* layer, char** json) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& of = capi::required(layer, "layer").layer;
    char*& to = capi::required(json, "json");
    to = capi::copy_json(capi::json_of_adapters(of));
  });
}

conclave_status conclave_lora_checkpoint_open(const char* directory,
                                              conclave_lora_checkpoint** out) noexcept {
  return capi::guarded([&] {
    const char* const of = &capi::required(directory, "directory");
    capi::required(out, "out");
    capi::hand_out(out, conclave::LoraCheckpoint::open(of));
  });
}

void conclave_lora_checkpoint_destroy(conclave_lora_checkpoint* checkpoint) noexcept {
  delete checkpoint;
}

conclave_status conclave_lora_checkpoint_get_info(const conclave_lora_checkpoint* checkpoint,
                                                  conclave_lora_checkpoint_info* info) noexcept {
  return capi::guarded([&] {
    const conclave::LoraCheckpoint& from = capi::lora_of(checkpoint);
    capi::fill(capi::fillable(info, "info"), {.struct_size = 0,
                                              .layers = from.layers().data(),
                                              .num_layers = from.layers().size(),
                                              .max_rank = from.max_rank(),
                                              .num_others = from.others().size()});
  });
}

conclave_status conclave_lora_checkpoint_other_at(const conclave_lora_checkpoint* checkpoint,
                                                  size_t position, const char** name) noexcept {
  return capi::guarded([&] {
    const auto others = capi::lora_of(checkpoint).others();
    const char*& to = capi::required(name, "name");
    capi::check_position(conclave::ErrorCode::kInvalidArgument, position, others.size(), "modules");
    to = others[position].c_str();
  });
}

conclave_status conclave_layer_add_adapter_from_checkpoint(
    conclave_layer* layer, const conclave_lora_checkpoint* checkpoint, int64_t index,
    const conclave_checkpoint* model, conclave_gate_up_order order, int32_t* id) noexcept {
  return capi::guarded([&] {
    conclave::MoeLayer& to = capi::required(layer, "layer").layer;
    const conclave::LoraCheckpoint& from = capi::lora_of(checkpoint);
    const auto rows = capi::choice_of("order", order, conclave::GateUpOrder::kSingle);
    int32_t& number = capi::required(id, "id");
    number = to.add_adapter(model == nullptr
                                ? from.layer(index, to.spec(), rows)
                                : from.layer(index, *capi::required(model, "model").checkpoint));
  });
}
