#include "convert/layers_plan.h"

#include "convert/forms/target_form.h"
#include "convert/gguf_model.h"
#include "convert/safetensors_model.h"
#include "convert/trunk_plan.h"

#include "conclave/directory_layers.h"
#include "conclave/error.h"
#include "conclave/gguf_layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

// Matrices of routed and shared experts get the form; routers, biases and the like stay exact.
bool belongs_to_experts(WeightId id) {
  return id.plane() == WeightPlane::kWeights && id.mlp() != WeightMlp::kResidual;
}

// A tensor of the result: matrices of one kind, those of an expert or of several in turn.
struct LayerTensor {
  std::string name;
  int64_t layer = 0;
  WeightId id = weights::kUp;
  std::optional<WeightId> other = {};  // beside that of each expert
  bool alternates = false;             // rows of the two in turn, not one below the other
  int64_t first_expert = 0;
  int64_t experts = 1;
  std::vector<int64_t> shape;
};

class LayersPlanner {
 public:
  LayersPlanner(const SourceModel& source, const ResolvedRequest& request)
      : source_(source),
        request_(request),
        values_(parse_kept_form("f32", ModelContainer::kGguf, request.rule)),
        rule_used_(request.keep.size()),
        trunk_(source, request) {}

  ConversionPlan plan() {
    const bool to_gguf = request_.container == ModelContainer::kGguf;
    const std::vector<LayerTensor> tensors = to_gguf ? gguf_tensors() : directory_tensors();
    plan_.forms.push_back(values_);
    std::unique_ptr<WeightSource> weights;
    int64_t current = -1;
    for (const LayerTensor& tensor : tensors) {
      if (std::exchange(current, tensor.layer) != tensor.layer) {
        weights = source_.checkpoint().layer_source(tensor.layer);
      }
      add_tensor(*weights, tensor);
    }
    check_rules();
    std::vector<std::vector<PlannedTensor>> units = trunk_.units(plan_.kept);
    const bool is_whole = trunk_.is_whole();
    plan_.incomplete = trunk_.reason();
    plan_.left_out = trunk_.left_out();
    if (is_whole) plan_.no_tokenizer = trunk_.no_tokenizer();
    for (PlannedTensor& bias : biases_) units.push_back({std::move(bias)});
    std::ranges::move(units_of_modules(), std::back_inserter(units));
    if (to_gguf && !is_whole) list_left_out();
    if (!to_gguf && !is_whole) add_kept_tensors(units);
    fill_shards(std::move(units), request_.shard_bytes,
                to_gguf ? gguf_shard_name : safetensors_shard_name, plan_);
    return std::move(plan_);
  }

 private:
  std::vector<LayerTensor> gguf_tensors() {
    GgufLayers layers = gguf_layers(source_.checkpoint(), request_.layers);
    plan_.keys = std::move(layers.keys);
    trunk_.plan_file(plan_.keys);
    std::vector<LayerTensor> tensors;
    for (GgufLayerTensor& tensor : layers.tensors) {
      const bool has_experts = tensor.id.mlp() == WeightMlp::kRouted;
      const int64_t experts = has_experts ? tensor.shape.front() : 1;
      tensors.push_back({.name = std::move(tensor.name),
                         .layer = tensor.layer,
                         .id = tensor.id,
                         .experts = experts,
                         .shape = std::move(tensor.shape)});
    }
    return tensors;
  }

  std::vector<LayerTensor> directory_tensors() {
    request_.form->check_model(source_.checkpoint());
    DirectoryLayers layers = directory_layers(
        source_.checkpoint(), request_.layers,
        request_.form->has_codes() ? DirectoryStacks::kNone : DirectoryStacks::kAsPublished);
    plan_.config = std::move(layers.config);
    trunk_.plan_directory(layers.model_type, plan_.config);
    std::vector<LayerTensor> tensors;
    for (DirectoryTensor& tensor : layers.tensors) {
      tensors.push_back({.name = std::move(tensor.name),
                         .layer = tensor.layer,
                         .id = tensor.id,
                         .other = tensor.other,
                         .first_expert = tensor.expert,
                         .experts = tensor.experts,
                         .shape = std::move(tensor.shape)});
    }
    return stacked(std::move(tensors));
  }

  // A linear layer of the form, where that is a stack; nothing otherwise.
  std::optional<ModulePlace> stack_of(const LayerTensor& tensor) const {
    if (tensor.id.mlp() != WeightMlp::kRouted) return std::nullopt;
    const std::string name = linear_layer_of(tensor.name);
    CheckpointLayer layer = source_.checkpoint().layer(tensor.layer);
    layer.prefix = name.substr(0, name.find("experts."));
    ModulePlace place = request_.form->place(
        layer, {.id = tensor.id, .expert = tensor.first_expert, .tensors = {}, .module = name});
    if (place.module == name) return std::nullopt;
    return place;
  }

  // Experts come together where the form has stacks, and their biases beside them.
  std::vector<LayerTensor> stacked(std::vector<LayerTensor> tensors) {
    std::vector<LayerTensor> result;
    for (LayerTensor& tensor : tensors) {
      const std::optional<ModulePlace> place = stack_of(tensor);
      if (!place) {
        result.push_back(std::move(tensor));
      } else if (tensor.id.plane() == WeightPlane::kBias) {
        add_bias(tensor, *place);
      } else {
        add_to_stack(std::move(tensor), *place, result);
      }
    }
    return result;
  }

  static void add_to_stack(LayerTensor tensor, const ModulePlace& place,
                           std::vector<LayerTensor>& result) {
    const auto same = std::ranges::find(result, place.module, &LayerTensor::name);
    if (same == result.end()) {
      tensor.name = place.module;
      tensor.alternates = place.alternates;
      result.push_back(std::move(tensor));
      return;
    }
    same->experts = std::max(same->experts, tensor.first_expert + 1);
    if (tensor.id != same->id) same->other = tensor.id;
  }

  // A file has a tensor for all experts' biases of one kind; gate's and up's become one in turn.
  void add_bias(const LayerTensor& tensor, const ModulePlace& place) {
    if (tensor.first_expert > 0) return;
    const int64_t experts = source_.checkpoint().layer(tensor.layer).spec.num_experts;
    const SourceTensor* const bias = &bias_stack(tensor, experts);
    const std::string name = place.module + "_bias";
    const auto same = std::ranges::find(biases_, name, &PlannedTensor::name);
    if (same == biases_.end()) {
      PlannedTensor planned = dense_tensor(name, DType::kF32, bias->shape);
      planned.moved = MovedTensor{.sources = {bias}};
      biases_.push_back(std::move(planned));
      return;
    }
    const SourceTensor* const gate = same->moved->sources.front();
    *same = dense_tensor(name, DType::kF32, {experts, 2 * bias->shape[1]});
    same->moved = MovedTensor{.sources = {gate, bias}, .heads = experts, .alternates = true};
  }

  const SourceTensor& bias_stack(const LayerTensor& tensor, int64_t experts) const {
    const WeightId matrix = tensor.id.with(WeightPlane::kWeights);
    const std::string ending = fmt::format("ffn_{}_exps.bias", to_string(matrix));
    for (const std::string& name : source_.checkpoint().layer_tensors(tensor.layer)) {
      const SourceTensor& found = *source_.find(name);
      const bool is_stack = found.shape.size() == 2 && found.shape[0] == experts;
      if (is_stack && name.ends_with(ending)) return found;
    }
    throw Error(ErrorCode::kUnsupported, {.what = "biases of the experts are not in one tensor",
                                          .tensor = tensor.name,
                                          .expected = "a tensor of all experts, " + ending});
  }

  std::set<std::string, std::less<>> names_that_layers_read() const {
    std::set<std::string, std::less<>> read;
    for (const int64_t layer : request_.layers) {
      for (std::string& name : source_.checkpoint().layer_tensors(layer)) {
        read.insert(std::move(name));
      }
    }
    return read;
  }

  void list_left_out() {
    const std::set<std::string, std::less<>> read = names_that_layers_read();
    for (const SourceTensor& tensor : source_.tensors()) {
      if (!read.contains(tensor.name)) plan_.left_out.push_back(tensor.name);
    }
  }

  // A tensor that no layer reads keeps its bytes and, behind a prefix, its name: blocks as bytes,
  // with their type at the name's end.
  void add_kept_tensors(std::vector<std::vector<PlannedTensor>>& units) const {
    const std::set<std::string, std::less<>> read = names_that_layers_read();
    for (const SourceTensor& tensor : source_.tensors()) {
      if (read.contains(tensor.name)) continue;
      PlannedTensor kept{.name = fmt::format("{}{}", kKeptPrefix, tensor.name),
                         .type = tensor.type,
                         .shape = tensor.shape,
                         .bytes = tensor.bytes,
                         .copied = &tensor};
      if (!parse_dtype(tensor.type)) {
        kept.name += "." + tensor.type;
        kept.type = to_string(DType::kU8);
        kept.shape = {static_cast<int64_t>(tensor.bytes)};
      }
      units.push_back({std::move(kept)});
    }
  }

  const TargetForm* form_of(const LayerTensor& tensor, const WeightInfo& info) {
    if (!belongs_to_experts(tensor.id)) return values_.get();
    const std::string name = linear_layer_of(tensor.name);
    for (size_t i = 0; i < request_.keep.size(); ++i) {
      if (!matches(request_.keep[i].pattern, name)) continue;
      rule_used_[i] = true;
      if (request_.keep[i].form) return request_.keep[i].form.get();
      return form_of_source(tensor, info);
    }
    return request_.form.get();
  }

  // Values keep their type; codes of one container are none of the other's.
  const TargetForm* form_of_source(const LayerTensor& tensor, const WeightInfo& info) {
    for (const auto& [dtype, name] :
         {std::pair(DType::kF32, "f32"), {DType::kF16, "f16"}, {DType::kBF16, "bf16"}}) {
      if (info.dtype != dtype) continue;
      plan_.forms.push_back(parse_kept_form(name, request_.container, request_.rule));
      return plan_.forms.back().get();
    }
    throw Error(ErrorCode::kUnsupported, {.what = "the source's codes have no place in the result",
                                          .tensor = tensor.name,
                                          .expected = "a form in place of \"source\"",
                                          .found = std::string(to_string(info.dtype))});
  }

  void add_tensor(const WeightSource& weights, const LayerTensor& tensor) {
    const WeightInfo info = weights.describe(tensor.id);
    ConvertedModule module{.name = linear_layer_of(tensor.name),
                           .layer = tensor.layer,
                           .rows = tensor.experts * info.rows * (tensor.other ? 2 : 1),
                           .cols = info.cols,
                           .form = form_of(tensor, info),
                           .tensor = tensor.name,
                           .shape = tensor.shape};
    module.is_stack = request_.container == ModelContainer::kSafetensors &&
                      (tensor.experts > 1 || tensor.other || tensor.shape.size() > 2);
    for (int64_t i = 0; i < tensor.experts; ++i) {
      const int64_t expert = tensor.first_expert + i;
      if (tensor.alternates) {
        module.parts.push_back(
            {.id = tensor.id, .other = tensor.other, .expert = expert, .rows = 2 * info.rows});
        continue;
      }
      module.parts.push_back({.id = tensor.id, .expert = expert, .rows = info.rows});
      if (!tensor.other) continue;
      module.parts.push_back({.id = *tensor.other, .expert = expert, .rows = info.rows});
    }
    module.form->check(module);
    if (belongs_to_experts(tensor.id)) list_matrices(weights, info, module);
    if (!module.form->has_codes() && tensor.shape.size() == 2) plan_.kept.push_back(module.name);
    plan_.modules.push_back(std::move(module));
  }

  void list_matrices(const WeightSource& weights, const WeightInfo& info, ConvertedModule& module) {
    const uint64_t matrices = static_cast<uint64_t>(module.rows / info.rows);
    module.source_bytes = bytes_of(weights, module.parts.front().id, info) * matrices /
                          static_cast<uint64_t>(info.count);
    for (ModulePart& part : module.parts) {
      part.matrix = plan_.matrices.size();
      const bool alone = module.parts.size() == 1;
      plan_.matrices.push_back(
          {.name = alone ? module.name : fmt::format("{}[{}]", module.name, part.expert),
           .module = static_cast<int32_t>(plan_.modules.size()),
           .kind = to_string(part.id) + (part.other ? "_up" : ""),
           .rows = part.rows});
    }
  }

  // Weights and the planes that give codes a meaning.
  static uint64_t bytes_of(const WeightSource& weights, WeightId id, const WeightInfo& info) {
    uint64_t bits = static_cast<uint64_t>(info.count * info.rows * info.cols) *
                    static_cast<uint64_t>(bit_size(info.dtype));
    for (const WeightPlane plane : {WeightPlane::kScale, WeightPlane::kZero}) {
      const WeightInfo other = weights.describe(id.with(plane));
      bits += static_cast<uint64_t>(other.count * other.rows * other.cols) *
              static_cast<uint64_t>(bit_size(other.dtype));
    }
    return bits / 8;
  }

  void check_rules() const {
    for (size_t i = 0; i < rule_used_.size(); ++i) {
      if (rule_used_[i]) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "no tensor of the experts has such a name",
                   .tensor = "keep",
                   .expected = "names such as " + plan_.matrices.front().name,
                   .found = request_.keep[i].pattern});
    }
  }

  std::vector<std::vector<PlannedTensor>> units_of_modules() const {
    std::vector<std::vector<PlannedTensor>> units;
    for (size_t i = 0; i < plan_.modules.size(); ++i) {
      std::vector<PlannedTensor> tensors = plan_.modules[i].form->tensors(plan_.modules[i]);
      for (PlannedTensor& tensor : tensors) tensor.module = static_cast<int32_t>(i);
      units.push_back(std::move(tensors));
    }
    return units;
  }

  const SourceModel& source_;
  const ResolvedRequest& request_;
  FormPointer values_;
  std::vector<bool> rule_used_;
  TrunkPlan trunk_;
  std::vector<PlannedTensor> biases_;  // they belong to experts in stacks
  ConversionPlan plan_;
};

}  // namespace

ConversionPlan plan_layers(const SourceModel& source, const ResolvedRequest& request) {
  return LayersPlanner(source, request).plan();
}

}  // namespace conclave::inline v0::conversion
