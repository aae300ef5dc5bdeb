#include "convert/request.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <system_error>

namespace conclave::inline v0::conversion {
namespace {

constexpr std::string_view kAsItIs = "source";

FormPointer form_of(const ConversionRequest& request, ModelContainer container) {
  if (request.values != nullptr) return parse_random_form(request.format, container);
  return parse_form(request.format, container_of(request.source), container, request.scales);
}

std::vector<KeptForm> kept_forms(const ConversionRequest& request, ModelContainer container) {
  std::vector<KeptForm> forms;
  for (const KeepRule& rule : request.keep) {
    if (rule.pattern.empty()) {
      throw Error(ErrorCode::kInvalidArgument, {.what = "a rule has no pattern",
                                                .tensor = "keep",
                                                .expected = "names, with * for any text"});
    }
    const bool stays = rule.format == kAsItIs;
    forms.push_back(
        {.pattern = rule.pattern,
         .form = stays ? nullptr : parse_kept_form(rule.format, container, request.scales)});
  }
  return forms;
}

void require_supported(const CheckpointLayer& layer, const Checkpoint& model) {
  if (layer.support) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = fmt::format("layer {} cannot run: {}", layer.index, layer.support.reason()),
               .file = model.directory().string()});
}

std::vector<int64_t> layers_of(const ConversionRequest& request, const Checkpoint& model) {
  std::vector<int64_t> layers = request.layers;
  if (layers.empty()) {
    for (const CheckpointLayer& layer : model.layers()) layers.push_back(layer.index);
  }
  if (layers.empty()) {
    throw Error(ErrorCode::kLayerNotFound, {.what = "the model has no MoE layers",
                                            .file = model.directory().string(),
                                            .found = model.model_type()});
  }
  std::ranges::sort(layers);
  const auto twice = std::ranges::unique(layers);
  layers.erase(twice.begin(), twice.end());
  for (const int64_t layer : layers) require_supported(model.layer(layer), model);
  return layers;
}

void check_fields(const ConversionRequest& request) {
  if (request.destination.empty()) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "the result has no name",
                                              .tensor = "destination",
                                              .expected = "a directory to make",
                                              .found = "an empty path"});
  }
  if (request.shard_bytes == 0) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a shard has no bytes",
                                              .tensor = "shard_bytes",
                                              .expected = "1 or more",
                                              .found = "0"});
  }
  constexpr int64_t kMostTokens = int64_t{1} << 20;
  if (request.tokens >= 0 && request.tokens <= kMostTokens) return;
  throw Error(ErrorCode::kInvalidArgument, {.what = "outputs are compared on some rows",
                                            .tensor = "tokens",
                                            .found = fmt::format("{}", request.tokens),
                                            .limit = fmt::format("0 to {}", kMostTokens)});
}

}  // namespace

ModelContainer container_of(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code problem;
  if (fs::is_regular_file(path, problem)) return ModelContainer::kGguf;
  if (fs::exists(path / "config.json", problem)) return ModelContainer::kSafetensors;
  // A path that cannot be listed is for the opening to report.
  for (fs::directory_iterator entry(path, problem), end; !problem && entry != end;
       entry.increment(problem)) {
    if (entry->path().extension() == ".gguf") return ModelContainer::kGguf;
  }
  return ModelContainer::kSafetensors;
}

ResolvedRequest resolve(const ConversionRequest& request, const Checkpoint& source) {
  check_fields(request);
  const ModelContainer container = container_of_result(request);
  // A directory with a GGUF file stands for that file.
  return {.source = request.values != nullptr ? request.source : source.directory(),
          .form = form_of(request, container),
          .container = container,
          .layers = layers_of(request, source),
          .keep = kept_forms(request, container),
          .rule = request.scales,
          .shard_bytes = request.shard_bytes};
}

// Greedy with one place to come back to: the work is linear in the product of the lengths.
bool matches(std::string_view pattern, std::string_view name) {
  size_t at = 0;
  size_t star = std::string_view::npos;
  size_t resume = 0;
  size_t i = 0;
  while (i < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++;
      resume = i;
    } else if (at < pattern.size() && (pattern[at] == '?' || pattern[at] == name[i])) {
      ++at;
      ++i;
    } else if (star != std::string_view::npos) {
      at = star + 1;
      i = ++resume;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

}  // namespace conclave::inline v0::conversion

namespace conclave::inline v0 {

ModelContainer container_of_result(const ConversionRequest& request) {
  if (request.container) return *request.container;
  const std::filesystem::path& path = request.destination;
  const std::filesystem::path named = path.has_filename() ? path : path.parent_path();
  if (named.extension() == ".gguf") return ModelContainer::kGguf;
  return conversion::only_container_of(request.format)
      .value_or(conversion::container_of(request.source));
}

}  // namespace conclave::inline v0
