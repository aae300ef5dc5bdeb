#include "checkpoint/code_words.h"
#include "checkpoint/describe_layer.h"
#include "checkpoint/layer_map.h"
#include "checkpoint/layer_source.h"
#include "checkpoint/layer_tensors.h"
#include "checkpoint/manifest.h"
#include "checkpoint/model_config.h"
#include "checkpoint/name_list.h"
#include "checkpoint/shard_index.h"
#include "io/directory.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

namespace conclave::inline v0 {
namespace {

using checkpoint::LayerMap;
using checkpoint::ModelConfig;
using checkpoint::ShardSet;
using checkpoint::StoredTensor;

constexpr std::string_view kConfigFile = "config.json";
// Older exports describe their quantisation beside config.json.
constexpr std::string_view kModeloptFile = "hf_quant_config.json";
constexpr std::array<std::string_view, 3> kQuantizationFiles = {"quantize_config.json",
                                                                "quant_config.json", kModeloptFile};

io::JsonDocument read_config_file(const io::Directory& directory) {
  if (!directory.contains(kConfigFile)) {
    throw Error(ErrorCode::kFileNotFound,
                {.what = "the directory has no model configuration",
                 .file = (directory.path() / kConfigFile).string(),
                 .hint = "give the directory of a Hugging Face model: config.json beside its "
                         ".safetensors files"});
  }
  return directory.read_json(kConfigFile);
}

ModelConfig read_config(const io::Directory& directory, const io::JsonDocument& document,
                        ExpertSet experts) {
  ModelConfig config = checkpoint::read_model_config(document.root(), experts);
  for (std::string_view name : kQuantizationFiles) {
    if (!config.quant_method.empty() || !directory.contains(name)) continue;
    checkpoint::Quantization found;
    found.method = fmt::format("the method of {}", name);
    if (name == kModeloptFile) {
      const io::JsonDocument described = directory.read_json(name);
      found = checkpoint::read_modelopt(described.root());
    }
    checkpoint::set_quantization(found, config);
  }
  return config;
}

std::string render_indexes(std::span<const CheckpointLayer> layers) {
  std::vector<int64_t> indexes;
  for (const CheckpointLayer& layer : layers) indexes.push_back(layer.index);
  return checkpoint::render_ranges(indexes);
}

uint64_t count_elements(const TensorInfo& tensor) {
  return std::accumulate(
      tensor.shape.begin(), tensor.shape.end(), uint64_t{1},
      [](uint64_t product, int64_t size) { return product * static_cast<uint64_t>(size); });
}

void append(std::vector<std::string>& notes, const std::vector<std::string>& more) {
  notes.insert(notes.end(), more.begin(), more.end());
}

}  // namespace

struct Checkpoint::Impl {
  std::filesystem::path directory;
  std::string architecture;
  ModelConfig config;
  ShardSet shards;
  std::vector<LayerMap> maps;  // in the order of `layers`
  std::vector<CheckpointLayer> layers;
  std::unique_ptr<checkpoint::TensorData> data;
  std::unique_ptr<checkpoint::Verifier> verifier;
  std::vector<std::string> notes;
  uint64_t total_bytes = 0;
  uint64_t total_parameters = 0;

  void add_layers(std::vector<LayerMap> found) {
    maps = std::move(found);
    for (size_t i = 0; i < maps.size(); ++i) {
      layers.push_back(checkpoint::describe_layer(config, config.layers[i], maps[i]));
    }
  }

  void add_totals() {
    for (const StoredTensor& tensor : shards.tensors) {
      total_bytes += tensor.info->bytes;
      total_parameters += count_elements(*tensor.info);
    }
  }

  void add_type_note() {
    if (!config.dtype || layers.empty() || !config.quant_method.empty()) return;
    const DType stored = layers.front().spec.weight_dtype;
    if (stored == *config.dtype) return;
    notes.push_back(fmt::format("config.json gives the type {}, the experts are stored as {}",
                                to_string(*config.dtype), to_string(stored)));
  }
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Checkpoint Checkpoint::open(const std::filesystem::path& path, const CheckpointOptions& options) {
  const io::Directory directory = io::Directory::open(path);
  auto impl = std::make_unique<Impl>();
  impl->directory = path;
  const io::JsonDocument document = read_config_file(directory);
  impl->config = read_config(directory, document, options.experts);
  impl->architecture = impl->config.architecture->name;
  impl->shards = checkpoint::open_shards(directory, options.access);
  impl->data = std::make_unique<checkpoint::ShardData>(impl->shards);
  checkpoint::describe_codes(impl->config.quant, impl->shards);
  const checkpoint::LayerTensors tensors = checkpoint::group_by_layer(
      impl->config, impl->shards,
      options.extra_layers ? checkpoint::ExtraLayers::kRead : checkpoint::ExtraLayers::kSkip);
  checkpoint::add_extra_layers(document.root(), tensors.extra_layers(), impl->config);
  checkpoint::settle_by_file(tensors, impl->shards, impl->config);
  checkpoint::settle_quantization(tensors, impl->shards, impl->config);
  impl->add_layers(impl->config.quantization.empty()
                       ? checkpoint::map_layers(impl->config, impl->shards, tensors)
                       : checkpoint::survey_layers(impl->config, impl->shards, tensors));
  impl->add_totals();
  append(impl->notes, impl->config.notes);
  append(impl->notes, impl->shards.notes);
  append(impl->notes, tensors.notes);
  impl->add_type_note();
  if (options.verify_manifest) {
    impl->verifier = std::make_unique<checkpoint::Verifier>(directory, impl->shards);
  }
  return Checkpoint(std::move(impl));
}

const std::filesystem::path& Checkpoint::directory() const noexcept { return impl_->directory; }
const std::string& Checkpoint::model_type() const noexcept { return impl_->config.model_type; }
const std::string& Checkpoint::architecture() const noexcept { return impl_->architecture; }
int64_t Checkpoint::num_hidden_layers() const noexcept { return impl_->config.num_hidden_layers; }
uint64_t Checkpoint::total_bytes() const noexcept { return impl_->total_bytes; }
uint64_t Checkpoint::total_parameters() const noexcept { return impl_->total_parameters; }
std::span<const CheckpointLayer> Checkpoint::layers() const noexcept { return impl_->layers; }
std::span<const std::string> Checkpoint::notes() const noexcept { return impl_->notes; }

const CheckpointLayer& Checkpoint::layer(int64_t index) const {
  const auto found =
      std::find_if(impl_->layers.begin(), impl_->layers.end(),
                   [&](const CheckpointLayer& layer) { return layer.index == index; });
  if (found != impl_->layers.end()) return *found;
  const int64_t count = impl_->config.num_hidden_layers;
  const bool dense = index >= 0 && index < count;
  throw Error(
      ErrorCode::kLayerNotFound,
      {.what = dense ? fmt::format("layer {} is dense, it has no experts", index)
                     : fmt::format("the model has no layer {}", index),
       .file = impl_->directory.string(),
       .expected = impl_->layers.empty() ? "a model with MoE layers"
                                         : "one of its MoE layers " + render_indexes(impl_->layers),
       .found = std::to_string(index),
       .limit = fmt::format("{} layers, 0 to {}", count, count - 1)});
}

std::unique_ptr<WeightSource> Checkpoint::layer_source(int64_t index) const {
  const CheckpointLayer& found = layer(index);
  const auto position = static_cast<size_t>(&found - impl_->layers.data());
  if (!impl_->config.quantization.empty()) {
    throw Error(
        ErrorCode::kUnsupportedQuantization,
        {.what = "the weights are " + checkpoint::quantization_reason(impl_->config.quantization),
         .file = (impl_->directory / kConfigFile).string(),
         .expected = "a model without quantization_config",
         .found = impl_->config.quantization});
  }
  return std::make_unique<checkpoint::LayerSource>(impl_->shards, *impl_->data,
                                                   impl_->maps[position], impl_->verifier.get());
}

void Checkpoint::write_manifest(const std::filesystem::path& path) {
  const io::Directory directory = io::Directory::open(path);
  const ShardSet shards = checkpoint::open_shards(directory, FileAccess::kAuto);
  checkpoint::write_manifest_file(directory, shards);
}

}  // namespace conclave::inline v0
