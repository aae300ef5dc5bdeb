#include "conclave/convert.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/json_text.h"
#include "capi/structs.h"
#include "capi/values.h"

#include "conclave/error.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::inline v0::capi {
namespace {

static_assert(CONCLAVE_EXISTING_MODEL_REFUSE == static_cast<int32_t>(ExistingModel::kRefuse) &&
              CONCLAVE_EXISTING_MODEL_REPLACE == static_cast<int32_t>(ExistingModel::kReplace) &&
              CONCLAVE_SCALE_RULE_AMAX == static_cast<int32_t>(ScaleRule::kAmax) &&
              CONCLAVE_SCALE_RULE_SEARCH == static_cast<int32_t>(ScaleRule::kSearch) &&
              CONCLAVE_MODEL_CONTAINER_SAFETENSORS ==
                  static_cast<int32_t>(ModelContainer::kSafetensors) + 1 &&
              CONCLAVE_MODEL_CONTAINER_GGUF == static_cast<int32_t>(ModelContainer::kGguf) + 1);

std::optional<ModelContainer> container_of(int32_t container) {
  check_choice("options.container", container, CONCLAVE_MODEL_CONTAINER_GGUF);
  if (container == CONCLAVE_MODEL_CONTAINER_AUTO) return std::nullopt;
  return static_cast<ModelContainer>(container - 1);
}

std::vector<KeepRule> rules_of(const conclave_convert_options& given) {
  constexpr size_t kMostRules = 65536;
  check_count("options.keep_count", given.keep_count, kMostRules);
  std::vector<KeepRule> rules;
  for (size_t i = 0; i < given.keep_count; ++i) {
    const std::string place = "options.keep[" + std::to_string(i) + "]";
    const auto rule = take_element(given.keep, i, "options.keep", place.c_str());
    rules.push_back({.pattern = &required(rule.pattern, (place + ".pattern").c_str())});
    if (rule.format != nullptr) rules.back().format = rule.format;
  }
  return rules;
}

// A status of the caller's function ends the conversion as it is.
void tell(const conclave_convert_options& given, std::string_view phase, int64_t done,
          int64_t total) {
  const std::string name(phase);
  conclave_convert_progress told{.struct_size = sizeof(told),
                                 .phase = name.c_str(),
                                 .done = done,
                                 .total = total,
                                 .reason = nullptr};
  const conclave_status status = given.progress(given.progress_user, &told);
  if (status == CONCLAVE_OK) return;
  throw Error(find_code(status).value_or(ErrorCode::kCancelled),
              {.what = "the caller's function ended the conversion" +
                       (told.reason == nullptr ? "" : ": " + std::string(told.reason)),
               .tensor = "options.progress",
               .found = "status " + std::to_string(status)});
}

int64_t tokens_of(const conclave_convert_options& given) {
  constexpr int64_t kMostTokens = int64_t{1} << 20;
  if (given.tokens < 0 || given.tokens > kMostTokens) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "outputs are compared on some rows",
                                              .tensor = "options.tokens",
                                              .found = std::to_string(given.tokens),
                                              .limit = "0 to " + std::to_string(kMostTokens)});
  }
  if ((given.flags & CONCLAVE_CONVERT_NO_COMPARISON) != 0) return 0;
  return given.tokens == 0 ? ConversionRequest{}.tokens : given.tokens;
}

ConversionRequest request_of(const conclave_convert_options& given) {
  check_flags("options.flags", given.flags,
              CONCLAVE_CONVERT_KEEP_UNFINISHED | CONCLAVE_CONVERT_NO_COMPARISON);
  constexpr size_t kMostLayers = 65536;
  const auto layers = array_of(given.layers, given.layers_count, "options.layers",
                               "options.layers_count", kMostLayers);
  const bool keeps = (given.flags & CONCLAVE_CONVERT_KEEP_UNFINISHED) != 0;
  ConversionRequest request{
      .container = container_of(given.container),
      .layers = {layers.begin(), layers.end()},
      .keep = rules_of(given),
      .scales = choice_of("options.scales", given.scales, ScaleRule::kSearch),
      .existing = choice_of("options.existing", given.existing, ExistingModel::kReplace),
      .unfinished = keeps ? UnfinishedModel::kKeep : UnfinishedModel::kRemove,
      .tokens = tokens_of(given),
      .seed = given.seed};
  if (given.shard_bytes != 0) request.shard_bytes = given.shard_bytes;
  if (given.progress != nullptr) {
    request.progress = [given](std::string_view phase, int64_t done, int64_t total) {
      tell(given, phase, done, total);
    };
  }
  return request;
}

double relative_error(const ConversionReport& report) {
  QuantiseError sum;
  for (const ConvertedMatrix& matrix : report.matrices) sum.add(matrix.error);
  return sum.relative();
}

// NaN where a token is not finite.
double worst_error(const ConversionReport& report) {
  double worst = 0;
  for (const ConvertedLayer& layer : report.layers) {
    if (std::isnan(layer.worst)) return layer.worst;
    worst = std::max(worst, layer.worst);
  }
  return worst;
}

}  // namespace
}  // namespace conclave::inline v0::capi

struct conclave_conversion {
  conclave::ConversionReport report;
  std::string model;

  explicit conclave_conversion(conclave::ConversionReport made)
      : report(std::move(made)), model(report.model.string()) {}
};

namespace capi = conclave::capi;

conclave_status conclave_convert_model(const conclave_context* context, const char* source,
                                       const char* destination, const char* format,
                                       const conclave_convert_options* options,
                                       conclave_conversion** out) noexcept {
  return capi::guarded([&] {
    const conclave::Context& with = *capi::required(context, "context").state->context;
    capi::required(source, "source");
    capi::required(destination, "destination");
    capi::required(format, "format");
    capi::check_aligned("out", out, alignof(conclave_conversion*));
    conclave::ConversionRequest request = capi::request_of(capi::take_optional(options, "options"));
    request.source = source;
    request.destination = destination;
    request.format = format;
    auto made = std::make_unique<conclave_conversion>(conclave::convert_model(with, request));
    if (out != nullptr) *out = made.release();
  });
}

void conclave_conversion_destroy(conclave_conversion* conversion) noexcept { delete conversion; }

conclave_status conclave_conversion_get_info(const conclave_conversion* conversion,
                                             conclave_conversion_info* info) noexcept {
  return capi::guarded([&] {
    const conclave_conversion& of = capi::required(conversion, "conversion");
    const conclave::ConversionReport& report = of.report;
    capi::fill(capi::fillable(info, "info"), {.struct_size = 0,
                                              .model = of.model.c_str(),
                                              .model_type = report.model_type.c_str(),
                                              .incomplete = report.incomplete.c_str(),
                                              .no_tokenizer = report.no_tokenizer.c_str(),
                                              .bytes_before = report.bytes_before,
                                              .bytes_after = report.bytes_after,
                                              .shards = report.shards,
                                              .shards_kept = report.shards_kept,
                                              .num_matrices = report.matrices.size(),
                                              .num_layers = report.layers.size(),
                                              .relative_error = capi::relative_error(report),
                                              .worst_error = capi::worst_error(report)});
  });
}

conclave_status conclave_conversion_json(const conclave_conversion* conversion,
                                         char** json) noexcept {
  return capi::guarded([&] {
    const conclave_conversion& of = capi::required(conversion, "conversion");
    char*& to = capi::required(json, "json");
    to = capi::copy_text(conclave::to_json(of.report));
  });
}

conclave_status conclave_convert_formats_json(char** json) noexcept {
  return capi::guarded([&] {
    char*& to = capi::required(json, "json");
    capi::Json rows = capi::Json::array();
    for (const conclave::ConversionFormat& format : conclave::conversion_formats()) {
      const bool is_gguf = format.container == conclave::ModelContainer::kGguf;
      rows.push_back({{"name", format.name},
                      {"container", is_gguf ? "gguf" : "safetensors"},
                      {"options", format.options}});
    }
    to = capi::copy_json(rows);
  });
}
