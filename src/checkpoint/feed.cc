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

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>

namespace conclave::inline v0 {
namespace {

using checkpoint::LayerConfig;
using checkpoint::LayerMap;
using checkpoint::LayerTensors;
using checkpoint::ModelConfig;

constexpr std::string_view kConfigName = "config.json";
constexpr const char* kFedName = "tensors put";

// The bytes of the tensors that were put, by tensor number; empty for names that are only known.
class FedData final : public checkpoint::TensorData {
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

void check_tensor(const std::string& name, const ConstTensorView& tensor, FeedMemory memory) {
  if (tensor.data == nullptr && tensor.shape.num_elements() > 0) {
    throw Error(ErrorCode::kNullPointer, {.what = "a tensor without data", .tensor = name});
  }
  if (tensor.row_stride * bit_size(tensor.dtype) % 8 != 0) {
    throw Error(ErrorCode::kStride, {.what = "rows begin inside a byte",
                                     .tensor = name,
                                     .found = fmt::format("row_stride {}", tensor.row_stride)});
  }
  const bool dense =
      tensor.row_stride == 0 ||
      (tensor.shape.rank() > 0 && tensor.row_stride == tensor.shape[tensor.shape.rank() - 1]);
  if (dense || (memory == FeedMemory::kCopy && tensor.shape.rank() == 2)) return;
  throw Error(ErrorCode::kStride, {.what = "only dense tensors can be kept in place",
                                   .tensor = name,
                                   .expected = "row_stride 0",
                                   .found = fmt::format("row_stride {}", tensor.row_stride)});
}

std::vector<std::byte> copy_dense(const ConstTensorView& tensor, size_t bytes) {
  std::vector<std::byte> copy(bytes);
  const auto* data = static_cast<const std::byte*>(tensor.data);
  if (bytes == 0) return copy;
  if (tensor.row_stride == 0) {
    std::memcpy(copy.data(), data, bytes);
    return copy;
  }
  const auto rows = static_cast<size_t>(tensor.shape[0]);
  const size_t row_bytes = bytes / rows;
  const auto stride_bytes = static_cast<size_t>(packed_bytes(tensor.dtype, tensor.row_stride));
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(copy.data() + row * row_bytes, data + row * stride_bytes, row_bytes);
  }
  return copy;
}

}  // namespace

struct CheckpointFeed::Impl {
  ModelConfig config;
  std::vector<int64_t> layers;
  checkpoint::TensorTable table;
  std::deque<TensorInfo> infos;  // the tensors that `table` points to
  std::unordered_map<std::string, int32_t> by_name;
  FedData data;
  mutable std::unordered_map<int64_t, std::unique_ptr<LayerMap>> maps;  // for complete layers
  // Specs without quantisation, by layer number, for a quantised model: its matrices count as
  // quantised until one is put that is not.
  std::unordered_map<int64_t, MoeSpec> plain_specs;

  explicit Impl(ModelConfig model) : config(std::move(model)) {
    for (const LayerConfig& layer : config.layers) layers.push_back(layer.index);
    table.names = {kFedName};
    table.paths = {kFedName};
    table.listing = kFedName;
  }

  void assume_quantised() {
    if (!config.quant || config.quant->by_module) return;
    for (LayerConfig& layer : config.layers) {
      plain_specs.emplace(layer.index, layer.spec);
      checkpoint::quantise(*config.quant, layer.spec);
    }
  }

  // Applies what the type of a tensor says about its part: the quantiser leaves out whole modules.
  void settle(LayerConfig& layer, checkpoint::Part part, const std::string& name, DType dtype) {
    const auto plain = plain_specs.find(layer.index);
    if (plain == plain_specs.end()) return;
    if (part == checkpoint::Part::kResidualDown) {
      layer.spec.residual.weight_dtype = checkpoint::type_of_values(dtype);
    }
    if (!checkpoint::is_quantisable(part)) return;
    const DType codes = config.quant->element;
    if (dtype != codes && !is_plain(dtype)) {
      throw Error(ErrorCode::kUnsupportedQuantization,
                  {.what = "weights in codes that are not read",
                   .tensor = name,
                   .expected = std::string(to_string(codes)) + ", F32, F16 or BF16",
                   .found = std::string(to_string(dtype))});
    }
    if (dtype == codes || layer.spec.weight_dtype != codes) return;
    if (part == checkpoint::Part::kSharedDown) {
      layer.spec.shared.weight_dtype = dtype;
    } else if (part == checkpoint::Part::kDown) {
      MoeSpec unquantised = plain->second;
      unquantised.router.has_selection_bias = layer.spec.router.has_selection_bias;
      layer.spec = unquantised;
    }
  }

  // The use of a tensor beside a matrix that layers have as values, where that is packed.
  std::optional<checkpoint::StoredPlane::Use> use_beside_values(
      const std::optional<checkpoint::QuantizedWeights>& quant,
      const checkpoint::LayerShapes& shapes, const std::string& name, std::string_view rest) const {
    const auto* const form =
        checkpoint::form_of_values({.model = config.quant, .layer = quant}, name);
    if (form == nullptr) return std::nullopt;
    const auto aid = checkpoint::match_value_aid(*config.architecture, *form, shapes, rest);
    return aid ? std::optional(aid->use) : std::nullopt;
  }

  // A rule for modules may be one that is not read.
  const checkpoint::ModuleScheme* scheme_of(const std::string& name) const {
    try {
      return checkpoint::scheme_of_tensor(*config.quant, name);
    } catch (const checkpoint::NotRead& verdict) {
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
    checkpoint::quantise(*scheme->weights, part.spec);
    return part;
  }

  // The layer as the tensors that were put say.
  LayerConfig settled(const LayerConfig& layer, const LayerTensors& tensors) const {
    return checkpoint::settled_layer(config, table, tensors, layer);
  }

  // The place of a layer in `config`; nothing for others.
  std::optional<size_t> find_layer(int64_t index) const {
    const auto found = std::ranges::lower_bound(layers, index);
    if (found == layers.end() || *found != index) return std::nullopt;
    return static_cast<size_t>(found - layers.begin());
  }

  const LayerConfig& layer(int64_t index) const {
    if (const auto place = find_layer(index)) return config.layers[*place];
    throw Error(ErrorCode::kLayerNotFound,
                {.what = fmt::format("the model has no MoE layer {}", index),
                 .expected = "one of the MoE layers " + checkpoint::render_ranges(layers),
                 .found = std::to_string(index)});
  }

  // Everything that was put, grouped by layer.
  LayerTensors grouped() const { return checkpoint::group_by_layer(config, table); }

  // Checks the last tensor alone in its layer: its shape, its expert and, if it certainly belongs
  // to the model, its name. Throws Error otherwise.
  void check_last(const checkpoint::LayerName& name, const LayerConfig& layer,
                  bool is_known) const {
    LayerTensors alone;
    alone.trunk = name.trunk;
    alone.layers.resize(static_cast<size_t>(config.num_hidden_layers));
    alone.layers[static_cast<size_t>(layer.index)].push_back(
        {.tensor = static_cast<int32_t>(table.tensors.size() - 1),
         .rest = name.rest,
         .canonical = name.canonical});
    const auto assignment = checkpoint::assign_layer(config, table, alone, layer, {});
    if (!is_known && checkpoint::looks_like_expert(*config.architecture, name.rest)) {
      checkpoint::check_strays(assignment);
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
        map = std::make_unique<LayerMap>(
            checkpoint::map_layer(config, table, tensors, settled(wanted, tensors)));
      } catch (...) {
        maps.erase(index);
        throw;
      }
    }
    return *map;
  }
};

CheckpointFeed::CheckpointFeed(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointFeed::CheckpointFeed(CheckpointFeed&&) noexcept = default;
CheckpointFeed& CheckpointFeed::operator=(CheckpointFeed&&) noexcept = default;
CheckpointFeed::~CheckpointFeed() = default;

CheckpointFeed CheckpointFeed::from_config(std::string_view config_json) {
  const io::JsonDocument document = io::JsonDocument::parse(
      std::string(config_json), std::string(kConfigName), io::kConfigLimits);
  ModelConfig config = checkpoint::read_model_config(document.root());
  if (!config.quantization.empty()) {
    throw Error(ErrorCode::kUnsupportedQuantization,
                {.what = "the weights are " + checkpoint::quantization_reason(config.quantization),
                 .file = std::string(kConfigName),
                 .tensor = "quantization_config",
                 .expected = "a method and settings of docs/quantisation.md, or values",
                 .found = config.quantization});
  }
  if (config.architecture->router.selection_bias_by_file) {
    // A layer has the bias once it is put.
    for (LayerConfig& layer : config.layers) layer.spec.router.has_selection_bias = false;
  }
  auto impl = std::make_unique<Impl>(std::move(config));
  impl->assume_quantised();
  return CheckpointFeed(std::move(impl));
}

CheckpointFeed CheckpointFeed::from_spec(const MoeSpec& spec, std::string_view model_type,
                                         std::span<const int64_t> layers) {
  ModelConfig config = checkpoint::model_of(spec, model_type, layers);
  config.quant = checkpoint::usual_storage(spec.weight_dtype, spec.quant);
  return CheckpointFeed(std::make_unique<Impl>(std::move(config)));
}

CheckpointFeed CheckpointFeed::from_spec(const MoeSpec& spec, std::string_view model_type,
                                         std::span<const int64_t> layers,
                                         std::string_view quantization,
                                         std::span<const std::string> modules) {
  ModelConfig config = checkpoint::model_of(spec, model_type, layers);
  config.quant = checkpoint::read_method(quantization, spec.weight_dtype, modules);
  auto impl = std::make_unique<Impl>(std::move(config));
  impl->assume_quantised();
  return CheckpointFeed(std::move(impl));
}

bool CheckpointFeed::put(std::string_view name, const ConstTensorView& tensor, FeedMemory memory) {
  Impl& impl = *impl_;
  const checkpoint::Architecture& architecture = *impl.config.architecture;
  const std::string full(name);
  io::check_tensor_name(full, kFedName);
  check_tensor(io::show_name(full), tensor, memory);
  if (impl.by_name.contains(full)) {
    throw Error(ErrorCode::kTensorDuplicate,
                {.what = "a tensor of this name was put before", .tensor = io::show_name(full)});
  }
  auto split = checkpoint::split_model_name(architecture, full);
  const auto matrix =
      split ? checkpoint::matrix_name(impl.config.quant, split->rest) : std::nullopt;
  if (matrix) split->rest = *matrix;
  const auto place = split ? impl.find_layer(split->layer) : std::nullopt;
  if (!place) return false;
  LayerConfig& layer = impl.config.layers[*place];

  const bool by_file =
      architecture.router.selection_bias_by_file && tensor.shape.num_elements() > 0;
  const LayerConfig part = impl.as_part(layer, full);
  const auto& quant = part.quant != nullptr ? *part.quant : impl.config.quant;
  const checkpoint::LayerShapes shapes = checkpoint::layer_shapes(part.spec);
  const auto pattern =
      checkpoint::match_name(architecture, split->rest, [&](const checkpoint::NamePattern& known) {
        if (by_file && known.part == checkpoint::Part::kSelectionBias) return true;
        return checkpoint::has_all(shapes, checkpoint::ids_of(known.part));
      });
  const bool is_scale =
      !pattern && checkpoint::match_scale_name(architecture, quant, shapes, split->rest);
  auto aid = pattern || is_scale ? std::nullopt
                                 : checkpoint::match_aid(architecture, quant, shapes, split->rest);
  if (!pattern && !is_scale && !aid) {
    aid = impl.use_beside_values(quant, shapes, full, split->rest);
  }
  if (aid == checkpoint::StoredPlane::Use::kUnused) return false;
  const bool is_known = (pattern || is_scale || aid) && split->canonical;
  if (!is_known && !checkpoint::in_moe_block(architecture, split->rest)) return false;
  if (!is_known && tensor.shape.num_elements() == 0) return false;
  if (is_known && pattern && pattern->pattern->part == checkpoint::Part::kSelectionBias) {
    layer.spec.router.has_selection_bias = true;
  }
  impl.add(full, tensor);
  try {
    impl.check_last(*split, part, is_known);
    if (is_known && pattern) {
      impl.settle(layer, pattern->pattern->part, io::show_name(full),
                  checkpoint::type_as_codes(quant, impl.infos.back()));
    }
  } catch (...) {
    impl.drop_last();
    throw;
  }
  FedData::Bytes data{.name = impl.infos.back().name};
  if (is_known && memory == FeedMemory::kCopy) {
    data.owned = copy_dense(tensor, impl.infos.back().bytes);
  } else if (is_known) {
    data.view = {static_cast<const std::byte*>(tensor.data), impl.infos.back().bytes};
  }
  impl.data.add(std::move(data));
  impl.by_name.emplace(full, static_cast<int32_t>(impl.table.tensors.size() - 1));
  impl.maps.erase(layer.index);
  return is_known;
}

std::span<const int64_t> CheckpointFeed::layers() const noexcept { return impl_->layers; }

std::vector<std::string> CheckpointFeed::missing(size_t limit) const {
  const LayerTensors tensors = impl_->grouped();
  std::vector<std::string> names;
  for (const LayerConfig& layer : impl_->config.layers) {
    if (names.size() >= limit) break;
    const auto more = checkpoint::missing_tensors(
        impl_->config, impl_->table, tensors, impl_->settled(layer, tensors), limit - names.size());
    names.insert(names.end(), more.begin(), more.end());
  }
  return names;
}

bool CheckpointFeed::is_complete(int64_t layer) const {
  const LayerTensors tensors = impl_->grouped();
  const LayerConfig wanted = impl_->settled(impl_->layer(layer), tensors);
  return checkpoint::missing_tensors(impl_->config, impl_->table, tensors, wanted, 1).empty();
}

CheckpointLayer CheckpointFeed::layer(int64_t index) const {
  const LayerMap& map = impl_->map(index);
  const LayerConfig layer = impl_->settled(impl_->layer(index), impl_->grouped());
  return checkpoint::describe_layer(impl_->config, layer, map);
}

void CheckpointFeed::release(int64_t layer) {
  static const TensorInfo kGone;  // a name that no layer has
  Impl& impl = *impl_;
  const int64_t index = impl.layer(layer).index;
  for (size_t i = 0; i < impl.table.tensors.size(); ++i) {
    const TensorInfo*& info = impl.table.tensors[i].info;
    const auto name = checkpoint::split_model_name(*impl.config.architecture, info->name);
    if (!name || name->layer != index) continue;
    impl.by_name.erase(info->name);
    impl.data.forget(static_cast<int32_t>(i));
    info = &kGone;
  }
  impl.maps.erase(index);
}

std::unique_ptr<WeightSource> CheckpointFeed::layer_source(int64_t index) const {
  return checkpoint::make_layer_source(impl_->table, impl_->data, impl_->map(index), nullptr);
}

}  // namespace conclave::inline v0
