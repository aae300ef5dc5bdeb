#include "convert/layers_plan.h"

#include "convert/forms/target_form.h"
#include "convert/gguf_model.h"
#include "convert/safetensors_model.h"

#include "conclave/directory_layers.h"
#include "conclave/error.h"
#include "conclave/gguf_layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <utility>

namespace conclave::tool {
namespace {

constexpr std::string_view kWeight = ".weight";

std::string without_ending(const std::string& name) {
  return name.ends_with(kWeight) ? name.substr(0, name.size() - kWeight.size()) : name;
}

// Matrices of routed and shared experts get the form; routers, biases and the like stay exact.
bool belongs_to_experts(WeightId id) {
  return id.plane() == WeightPlane::kWeights && id.mlp() != WeightMlp::kResidual;
}

// A tensor of the result: matrices of one kind, those of an expert or of several in turn.
struct LayerTensor {
  std::string name;
  int64_t layer = 0;
  WeightId id = weights::kUp;
  int64_t first_expert = 0;
  int64_t experts = 1;
  std::vector<int64_t> shape;
};

class LayersPlanner {
 public:
  LayersPlanner(const SourceModel& source, const ConvertRequest& request)
      : source_(source),
        request_(request),
        values_(parse_kept_form("f32", Container::kGguf, request.rule)),
        rule_used_(request.keep.size()) {}

  ConversionPlan plan() {
    const bool to_gguf = request_.container == Container::kGguf;
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
    std::vector<std::vector<PlannedTensor>> units = units_of_modules();
    if (!to_gguf) add_kept_tensors(units);
    fill_shards(std::move(units), request_.shard_bytes,
                to_gguf ? gguf_shard_name : safetensors_shard_name, plan_);
    return std::move(plan_);
  }

 private:
  std::vector<LayerTensor> gguf_tensors() {
    GgufLayers layers = gguf_layers(source_.checkpoint(), request_.layers);
    plan_.keys = std::move(layers.keys);
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
    DirectoryLayers layers = directory_layers(source_.checkpoint(), request_.layers);
    plan_.config = std::move(layers.config);
    std::vector<LayerTensor> tensors;
    for (DirectoryTensor& tensor : layers.tensors) {
      tensors.push_back({.name = std::move(tensor.name),
                         .layer = tensor.layer,
                         .id = tensor.id,
                         .first_expert = tensor.expert,
                         .shape = std::move(tensor.shape)});
    }
    return tensors;
  }

  // A tensor that no layer reads keeps its bytes and, behind a prefix, its name: blocks as bytes,
  // with their type at the name's end.
  void add_kept_tensors(std::vector<std::vector<PlannedTensor>>& units) const {
    std::set<std::string, std::less<>> read;
    for (const int64_t layer : request_.layers) {
      for (std::string& name : source_.checkpoint().layer_tensors(layer)) {
        read.insert(std::move(name));
      }
    }
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
    const std::string name = without_ending(tensor.name);
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
    ConvertedModule module{.name = without_ending(tensor.name),
                           .layer = tensor.layer,
                           .rows = tensor.experts * info.rows,
                           .cols = info.cols,
                           .form = form_of(tensor, info),
                           .tensor = tensor.name,
                           .shape = tensor.shape};
    check_place(tensor, module);
    for (int64_t i = 0; i < tensor.experts; ++i) {
      module.parts.push_back(
          {.id = tensor.id, .expert = tensor.first_expert + i, .rows = info.rows});
    }
    module.form->check(module);
    if (belongs_to_experts(tensor.id)) list_matrices(weights, info, module);
    if (!module.form->has_codes() && tensor.shape.size() == 2) plan_.kept.push_back(module.name);
    plan_.modules.push_back(std::move(module));
  }

  // A form of a directory may stack experts, which have biases in stacks of another order then.
  void check_place(const LayerTensor& tensor, const ConvertedModule& module) const {
    const StoredMatrix matrix{
        .id = tensor.id, .expert = tensor.first_expert, .tensors = {}, .module = module.name};
    const CheckpointLayer& layer = source_.checkpoint().layer(tensor.layer);
    if (module.form->place(layer, matrix).module == module.name) return;
    refuse_module(module, "a GGUF file's experts get tensors of their own", module.form->name(),
                  "a form without stacks", "mxfp4 with --container directory has the same codes");
  }

  void list_matrices(const WeightSource& weights, const WeightInfo& info, ConvertedModule& module) {
    module.source_bytes = bytes_of(weights, module.parts.front().id, info) * module.parts.size() /
                          static_cast<uint64_t>(info.count);
    for (ModulePart& part : module.parts) {
      part.matrix = plan_.matrices.size();
      const bool alone = module.parts.size() == 1;
      plan_.matrices.push_back(
          {.name = alone ? module.name : fmt::format("{}[{}]", module.name, part.expert),
           .module = static_cast<int32_t>(plan_.modules.size()),
           .kind = to_string(part.id),
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
                   .tensor = "--keep",
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
  const ConvertRequest& request_;
  FormPointer values_;
  std::vector<bool> rule_used_;
  ConversionPlan plan_;
};

}  // namespace

ConversionPlan plan_layers(const SourceModel& source, const ConvertRequest& request) {
  return LayersPlanner(source, request).plan();
}

}  // namespace conclave::tool
