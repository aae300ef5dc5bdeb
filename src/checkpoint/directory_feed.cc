#include "checkpoint/directory_feed.h"

#include "checkpoint/coded_values.h"
#include "checkpoint/describe_layer.h"
#include "checkpoint/fed_model.h"
#include "checkpoint/layer_assignment.h"
#include "checkpoint/layer_map.h"
#include "checkpoint/layer_report.h"
#include "checkpoint/layer_tensors.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/mixed_source.h"
#include "checkpoint/model_config.h"
#include "checkpoint/module_names.h"
#include "checkpoint/name_list.h"
#include "checkpoint/scale_names.h"
#include "checkpoint/stored_planes.h"
#include "checkpoint/tensor_data.h"
#include "checkpoint/tensor_name.h"
#include "core/weight_types.h"
#include "io/safetensors_rules.h"
#include "io/text.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kConfigName = "config.json";
constexpr const char* kFedName = "tensors put";

// The bytes of the tensors that were put, by tensor number; empty for names that are only known.
class FedData final : public TensorData {
 public:
  struct Bytes {
    std::vector<std::byte> owned = {};
    std::span<const std::byte> view = {};
    std::string_view name = {};  // for errors
  };

  void add(Bytes bytes) {
    tensors_.push_back(std::move(bytes));
    Bytes& added = tensors_.back();
    if (!added.owned.empty()) added.view = added.owned;
  }
  void forget(int32_t tensor) {
    Bytes& released = tensors_[static_cast<size_t>(tensor)];
    released = {.name = released.name};
  }

  void read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const override {
    const std::span<const std::byte> kept = mapped(tensor);
    // The tensors that come later may make one a part of the layer that was not when it was put.
    if (kept.size() < offset || kept.size() - offset < destination.size()) {
      throw Error(ErrorCode::kTensorMissing,
                  {.what = "a tensor was not kept, since its layer did not need it when it was put",
                   .file = kFedName,
                   .tensor = io::show_name(tensors_[static_cast<size_t>(tensor)].name),
                   .expected = fmt::format("{} bytes", offset + destination.size()),
                   .found = fmt::format("{} bytes", kept.size())});
    }
    if (!destination.empty()) {
      std::memcpy(destination.data(), kept.data() + offset, destination.size());
    }
  }
  std::span<const std::byte> mapped(int32_t tensor) const override {
    return tensors_[static_cast<size_t>(tensor)].view;
  }

 private:
  std::deque<Bytes> tensors_;
};

// Holds what was put, and says which layers it is for.
struct FedLayers {
  ModelConfig config;
  std::vector<int64_t> layers;
  TensorTable table;
  std::deque<TensorInfo> infos;  // the tensors that `table` points to
  std::unordered_map<std::string, int32_t> by_name;
  FedData data;
  mutable std::unordered_map<int64_t, std::unique_ptr<LayerMap>> maps;  // for complete layers
  // Specs without quantisation, by layer number, for a quantised model: its matrices count as
  // quantised until one is put that is not.
  std::unordered_map<int64_t, MoeSpec> plain_specs;

  explicit FedLayers(ModelConfig model) : config(std::move(model)) {
    for (const LayerConfig& layer : config.layers) layers.push_back(layer.index);
    table.names = {kFedName};
    table.paths = {kFedName};
    table.listing = kFedName;
  }

  void assume_quantised() {
    if (!config.quant || config.quant->by_module) return;
    for (LayerConfig& layer : config.layers) {
      plain_specs.emplace(layer.index, layer.spec);
      quantise(*config.quant, layer.spec);
    }
  }

  // Applies what the type of a tensor says about its part: the quantiser leaves out whole modules.
  void settle(LayerConfig& layer, Part part, const std::string& name, DType dtype) {
    const auto plain = plain_specs.find(layer.index);
    if (plain == plain_specs.end()) return;
    if (part == Part::kResidualDown) {
      layer.spec.residual.weight_dtype = type_of_values(dtype);
    }
    if (!is_quantisable(part)) return;
    const DType codes = config.quant->element;
    if (dtype != codes && !is_plain(dtype)) {
      throw Error(ErrorCode::kUnsupportedQuantization,
                  {.what = "weights in codes that are not read",
                   .tensor = name,
                   .expected = std::string(to_string(codes)) + ", F32, F16 or BF16",
                   .found = std::string(to_string(dtype))});
    }
    if (dtype == codes || layer.spec.weight_dtype != codes) return;
    if (part == Part::kSharedDown) {
      layer.spec.shared.weight_dtype = dtype;
    } else if (part == Part::kDown) {
      MoeSpec unquantised = plain->second;
      unquantised.router.has_selection_bias = layer.spec.router.has_selection_bias;
      layer.spec = unquantised;
    }
  }

  // The use of a tensor beside a matrix that layers have as values, where that is packed.
  std::optional<StoredPlane::Use> use_beside_values(const std::optional<QuantizedWeights>& quant,
                                                    const LayerShapes& shapes,
                                                    const std::string& name,
                                                    std::string_view rest) const {
    const auto* const form = form_of_values({.model = config.quant, .layer = quant}, name);
    if (form == nullptr) return std::nullopt;
    const auto aid = match_value_aid(*config.architecture, *form, shapes, rest);
    return aid ? std::optional(aid->use) : std::nullopt;
  }

  // A rule for modules may be one that is not read.
  const ModuleScheme* scheme_of(const std::string& name) const {
    try {
      return scheme_of_tensor(*config.quant, name);
    } catch (const NotRead& verdict) {
      throw Error(ErrorCode::kUnsupportedQuantization,
                  {.what = "the weights are quantised by rules that are not read",
                   .tensor = io::show_name(name),
                   .found = verdict.reason});
    }
  }

  // The layer as the tensor's module has it, where modules have schemes of their own.
  LayerConfig as_part(const LayerConfig& layer, const std::string& name) const {
    LayerConfig part = layer;
    if (!config.quant || !config.quant->by_module) return part;
    const auto* const scheme = scheme_of(name);
    if (scheme == nullptr || !scheme->weights) return part;
    part.quant = &scheme->weights;
    quantise(*scheme->weights, part.spec);
    return part;
  }

  // The layer as the tensors that were put say.
  LayerConfig settled(const LayerConfig& layer, const LayerTensors& tensors) const {
    return settled_layer(config, table, tensors, layer);
  }

  // The place of a layer in `config`; nothing for others.
  std::optional<size_t> find_layer(int64_t index) const {
    const auto found = std::ranges::lower_bound(layers, index);
    if (found == layers.end() || *found != index) return std::nullopt;
    return static_cast<size_t>(found - layers.begin());
  }

  const LayerConfig& layer(int64_t index) const {
    if (const auto place = find_layer(index)) return config.layers[*place];
    reject_layer(layers, index);
  }

  // Everything that was put, grouped by layer.
  LayerTensors grouped() const { return group_by_layer(config, table); }

  // Checks the last tensor alone in its layer: its shape, its expert and, if it certainly belongs
  // to the model, its name. Throws Error otherwise.
  void check_last(const LayerName& name, const LayerConfig& layer, bool is_known) const {
    LayerTensors alone;
    alone.trunk = name.trunk;
    alone.layers.resize(static_cast<size_t>(config.num_hidden_layers));
    alone.layers[static_cast<size_t>(layer.index)].push_back(
        {.tensor = static_cast<int32_t>(table.tensors.size() - 1),
         .rest = name.rest,
         .canonical = name.canonical});
    const auto assignment = assign_layer(config, table, alone, layer, {});
    if (!is_known && looks_like_expert(*config.architecture, name.rest)) {
      check_strays(assignment);
    }
  }

  void add(const std::string& name, const ConstTensorView& tensor) {
    infos.push_back({.name = name,
                     .dtype = tensor.dtype,
                     .shape = {tensor.shape.dims().begin(), tensor.shape.dims().end()},
                     .file_offset = 0,
                     .bytes = dense_bytes(tensor.dtype, tensor.shape)});
    table.tensors.push_back({.info = &infos.back(), .shard = 0});
  }

  void drop_last() {
    table.tensors.pop_back();
    infos.pop_back();
  }

  const LayerMap& map(int64_t index) const {
    const LayerConfig& wanted = layer(index);
    std::unique_ptr<LayerMap>& map = maps[index];
    if (map == nullptr) {
      try {
        const LayerTensors tensors = grouped();
        map =
            std::make_unique<LayerMap>(map_layer(config, table, tensors, settled(wanted, tensors)));
      } catch (...) {
        maps.erase(index);
        throw;
      }
    }
    return *map;
  }
};

class DirectoryFeed final : public FeedContents {
 public:
  explicit DirectoryFeed(ModelConfig config) : fed_(std::move(config)) {}

  void assume_quantised() { fed_.assume_quantised(); }

  bool put(std::string_view name, const ConstTensorView& tensor, FeedMemory memory) override;
  bool put(std::string_view name, const GgufTensorView& tensor, FeedMemory memory) override;
  std::span<const int64_t> layers() const noexcept override { return fed_.layers; }
  std::vector<std::string> missing(size_t limit) const override;
  bool is_complete(int64_t layer) const override;
  CheckpointLayer layer(int64_t index) const override;
  std::unique_ptr<WeightSource> layer_source(int64_t index) const override;
  void release(int64_t layer) override;

 private:
  FedLayers fed_;
};

bool DirectoryFeed::put(std::string_view name, const ConstTensorView& tensor, FeedMemory memory) {
  const Architecture& architecture = *fed_.config.architecture;
  const std::string full(name);
  io::check_tensor_name(full, kFedName);
  check_fed_tensor(io::show_name(full), tensor, memory);
  if (fed_.by_name.contains(full)) {
    throw Error(ErrorCode::kTensorDuplicate,
                {.what = "a tensor of this name was put before", .tensor = io::show_name(full)});
  }
  auto split = split_model_name(architecture, full);
  const auto matrix = split ? matrix_name(fed_.config.quant, split->rest) : std::nullopt;
  if (matrix) split->rest = *matrix;
  const auto place = split ? fed_.find_layer(split->layer) : std::nullopt;
  if (!place) return false;
  LayerConfig& layer = fed_.config.layers[*place];

  const bool by_file =
      architecture.router.selection_bias_by_file && tensor.shape.num_elements() > 0;
  const LayerConfig part = fed_.as_part(layer, full);
  const auto& quant = part.quant != nullptr ? *part.quant : fed_.config.quant;
  const LayerShapes shapes = layer_shapes(part.spec);
  const auto pattern = match_name(architecture, split->rest, [&](const NamePattern& known) {
    if (by_file && known.part == Part::kSelectionBias) return true;
    return has_all(shapes, ids_of(known.part));
  });
  const bool is_scale = !pattern && match_scale_name(architecture, quant, shapes, split->rest);
  auto aid =
      pattern || is_scale ? std::nullopt : match_aid(architecture, quant, shapes, split->rest);
  if (!pattern && !is_scale && !aid) {
    aid = fed_.use_beside_values(quant, shapes, full, split->rest);
  }
  if (aid == StoredPlane::Use::kUnused) return false;
  const bool is_known = (pattern || is_scale || aid) && split->canonical;
  if (!is_known && !in_moe_block(architecture, split->rest)) return false;
  if (!is_known && tensor.shape.num_elements() == 0) return false;
  if (is_known && pattern && pattern->pattern->part == Part::kSelectionBias) {
    layer.spec.router.has_selection_bias = true;
  }
  fed_.add(full, tensor);
  try {
    fed_.check_last(*split, part, is_known);
    if (is_known && pattern) {
      fed_.settle(layer, pattern->pattern->part, io::show_name(full),
                  type_as_codes(quant, fed_.infos.back()));
    }
  } catch (...) {
    fed_.drop_last();
    throw;
  }
  FedData::Bytes data{.name = fed_.infos.back().name};
  if (is_known && memory == FeedMemory::kCopy) {
    data.owned = copy_dense(tensor, fed_.infos.back().bytes);
  } else if (is_known) {
    data.view = {static_cast<const std::byte*>(tensor.data), fed_.infos.back().bytes};
  }
  fed_.data.add(std::move(data));
  fed_.by_name.emplace(full, static_cast<int32_t>(fed_.table.tensors.size() - 1));
  fed_.maps.erase(layer.index);
  return is_known;
}

bool DirectoryFeed::put(std::string_view name, const GgufTensorView& /*tensor*/,
                        FeedMemory /*memory*/) {
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "a tensor of a GGUF model does not belong to a model directory",
               .tensor = io::show_name(name),
               .hint = "make the feed from the header of the GGUF file"});
}

std::vector<std::string> DirectoryFeed::missing(size_t limit) const {
  const LayerTensors tensors = fed_.grouped();
  std::vector<std::string> names;
  for (const LayerConfig& layer : fed_.config.layers) {
    if (names.size() >= limit) break;
    const auto more = missing_tensors(fed_.config, fed_.table, tensors,
                                      fed_.settled(layer, tensors), limit - names.size());
    names.insert(names.end(), more.begin(), more.end());
  }
  return names;
}

bool DirectoryFeed::is_complete(int64_t layer) const {
  const LayerTensors tensors = fed_.grouped();
  const LayerConfig wanted = fed_.settled(fed_.layer(layer), tensors);
  return missing_tensors(fed_.config, fed_.table, tensors, wanted, 1).empty();
}

CheckpointLayer DirectoryFeed::layer(int64_t index) const {
  const LayerMap& map = fed_.map(index);
  const LayerConfig layer = fed_.settled(fed_.layer(index), fed_.grouped());
  return describe_layer(fed_.config, layer, map);
}

void DirectoryFeed::release(int64_t layer) {
  static const TensorInfo kGone;  // a name that no layer has
  const int64_t index = fed_.layer(layer).index;
  for (size_t i = 0; i < fed_.table.tensors.size(); ++i) {
    const TensorInfo*& info = fed_.table.tensors[i].info;
    const auto name = split_model_name(*fed_.config.architecture, info->name);
    if (!name || name->layer != index) continue;
    fed_.by_name.erase(info->name);
    fed_.data.forget(static_cast<int32_t>(i));
    info = &kGone;
  }
  fed_.maps.erase(index);
}

std::unique_ptr<WeightSource> DirectoryFeed::layer_source(int64_t index) const {
  return make_layer_source(fed_.table, fed_.data, fed_.map(index), nullptr);
}

}  // namespace

std::unique_ptr<FeedContents> feed_of_config(std::string_view config_json) {
  const io::JsonDocument document = io::JsonDocument::parse(
      std::string(config_json), std::string(kConfigName), io::kConfigLimits);
  ModelConfig config = read_model_config(document.root());
  if (!config.quantization.empty()) {
    throw Error(ErrorCode::kUnsupportedQuantization,
                {.what = "the weights are " + quantization_reason(config.quantization),
                 .file = std::string(kConfigName),
                 .tensor = "quantization_config",
                 .expected = "a method and settings of docs/quantisation.md, or values",
                 .found = config.quantization});
  }
  if (config.architecture->router.selection_bias_by_file) {
    // A layer has the bias once it is put.
    for (LayerConfig& layer : config.layers) layer.spec.router.has_selection_bias = false;
  }
  auto feed = std::make_unique<DirectoryFeed>(std::move(config));
  feed->assume_quantised();
  return feed;
}

std::unique_ptr<FeedContents> feed_of_spec(const MoeSpec& spec, std::string_view model_type,
                                           std::span<const int64_t> layers) {
  ModelConfig config = model_of(spec, model_type, layers);
  config.quant = usual_storage(spec.weight_dtype, spec.quant);
  return std::make_unique<DirectoryFeed>(std::move(config));
}

std::unique_ptr<FeedContents> feed_of_method(const MoeSpec& spec, std::string_view model_type,
                                             std::span<const int64_t> layers,
                                             std::string_view quantization,
                                             std::span<const std::string> modules) {
  ModelConfig config = model_of(spec, model_type, layers);
  config.quant = read_method(quantization, spec.weight_dtype, modules);
  auto feed = std::make_unique<DirectoryFeed>(std::move(config));
  feed->assume_quantised();
  return feed;
}

}  // namespace conclave::inline v0::checkpoint
