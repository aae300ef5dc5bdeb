#include "checkpoint/directory_model.h"

#include "checkpoint/describe_layer.h"
#include "checkpoint/layer_map.h"
#include "checkpoint/layer_tensors.h"
#include "checkpoint/manifest.h"
#include "checkpoint/mixed_source.h"
#include "checkpoint/model_config.h"
#include "checkpoint/model_layers.h"
#include "checkpoint/shard_index.h"
#include "checkpoint/stored_matrices.h"
#include "io/directory.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kConfigFile = "config.json";

io::JsonDocument read_config_file(const io::Directory& directory) {
  if (!directory.contains(kConfigFile)) {
    throw Error(ErrorCode::kFileNotFound,
                {.what = "the directory has no model configuration",
                 .file = (directory.path() / kConfigFile).string(),
                 .hint = "give the directory of a Hugging Face model: config.json beside its "
                         ".safetensors files; or a GGUF file, or the directory of one"});
  }
  return directory.read_json(kConfigFile);
}

ModelConfig read_config(const io::Directory& directory, const io::JsonDocument& document,
                        ExpertSet experts) {
  ModelConfig config = read_model_config(document.root(), experts);
  if (config.quant_method.empty()) set_quantization(find_quantization_file(directory), config);
  return config;
}

uint64_t count_elements(const TensorInfo& tensor) {
  return std::accumulate(
      tensor.shape.begin(), tensor.shape.end(), uint64_t{1},
      [](uint64_t product, int64_t size) { return product * static_cast<uint64_t>(size); });
}

void append(std::vector<std::string>& notes, const std::vector<std::string>& more) {
  notes.insert(notes.end(), more.begin(), more.end());
}

class DirectoryContents final : public Contents {
 public:
  DirectoryContents(const std::filesystem::path& directory_path, const CheckpointOptions& options) {
    const io::Directory directory = io::Directory::open(directory_path);
    path = directory_path;
    const io::JsonDocument document = read_config_file(directory);
    config_ = read_config(directory, document, options.experts);
    model_type = config_.model_type;
    architecture = config_.architecture->name;
    num_hidden_layers = config_.num_hidden_layers;
    shards_ = open_shards(directory, options.access);
    data_ = std::make_unique<ShardData>(shards_);
    ModelLayers mapped =
        map_model(document.root(), shards_,
                  options.extra_layers ? ExtraLayers::kRead : ExtraLayers::kSkip, config_);
    add_layers(std::move(mapped.maps));
    add_totals();
    append(notes, config_.notes);
    append(notes, shards_.notes);
    append(notes, mapped.notes);
    add_type_note();
    if (options.verify_manifest) {
      verifier_ = std::make_unique<Verifier>(directory, kManifestFile,
                                             std::make_unique<ShardTensors>(shards_));
    }
  }

  std::unique_ptr<WeightSource> source(size_t position) const override {
    if (!config_.quantization.empty()) {
      throw Error(ErrorCode::kUnsupportedQuantization,
                  {.what = "the weights are " + quantization_reason(config_.quantization),
                   .file = (path / kConfigFile).string(),
                   .tensor = "quantization_config",
                   .expected = "a method and settings of docs/quantisation.md, or values",
                   .found = config_.quantization});
    }
    return make_layer_source(shards_, *data_, maps_[position], verifier_.get());
  }

  std::vector<StoredMatrix> stored_matrices(size_t position) const override {
    return name_matrices(config_, shards_, maps_[position]);
  }

  std::vector<std::string> tensors_of(size_t position) const override {
    std::vector<std::string> names;
    add_names(maps_[position], names);
    for (const LayerMap& part : maps_[position].parts) add_names(part, names);
    return names;
  }

 private:
  void add_names(const LayerMap& map, std::vector<std::string>& names) const {
    const auto add = [&](int32_t tensor) {
      if (tensor >= 0) names.push_back(shards_.info(tensor).name);
    };
    for (const WeightId id : weights::kAll) {
      for (const MatrixLocation& matrix : map.stored[id].matrices) add(matrix.tensor);
    }
    for (const PlaneReading& reading : map.readings) std::ranges::for_each(reading.inputs, add);
  }

  void add_layers(std::vector<LayerMap> found) {
    maps_ = std::move(found);
    for (size_t i = 0; i < maps_.size(); ++i) {
      layers.push_back(describe_layer(config_, config_.layers[i], maps_[i]));
    }
  }

  // Weights that a method stores in its own way count as what they mean: words hold several codes.
  void add_totals() {
    std::vector<bool> is_read(shards_.tensors.size(), false);
    const auto count_readings = [&](const LayerMap& map) {
      for (const PlaneReading& reading : map.readings) {
        total_parameters += static_cast<uint64_t>(reading.slices * reading.slice_elements);
        for (const int32_t input : reading.inputs) {
          if (input >= 0) is_read[static_cast<size_t>(input)] = true;
        }
      }
    };
    for (const LayerMap& map : maps_) {
      if (map.parts.empty()) count_readings(map);
      std::ranges::for_each(map.parts, count_readings);
    }
    for (size_t i = 0; i < is_read.size(); ++i) {
      const TensorInfo& info = *shards_.tensors[i].info;
      total_bytes += info.bytes;
      if (!is_read[i]) total_parameters += count_elements(info);
    }
  }

  void add_type_note() {
    if (!config_.dtype || layers.empty() || !config_.quant_method.empty()) return;
    const DType stored = layers.front().spec.weight_dtype;
    if (stored == *config_.dtype) return;
    notes.push_back(fmt::format("config.json gives the type {}, the experts are stored as {}",
                                to_string(*config_.dtype), to_string(stored)));
  }

  ModelConfig config_;
  ShardSet shards_;
  std::vector<LayerMap> maps_;  // in the order of `layers`
  std::unique_ptr<TensorData> data_;
  std::unique_ptr<Verifier> verifier_;
};

}  // namespace

std::unique_ptr<Contents> open_directory(const std::filesystem::path& path,
                                         const CheckpointOptions& options) {
  return std::make_unique<DirectoryContents>(path, options);
}

}  // namespace conclave::inline v0::checkpoint
