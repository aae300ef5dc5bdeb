#include "convert/gguf_layers_plan.h"

#include "convert/forms/target_form.h"
#include "convert/gguf_model.h"

#include "conclave/error.h"
#include "conclave/gguf_layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
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

class LayersPlanner {
 public:
  LayersPlanner(const SourceModel& source, const ConvertRequest& request)
      : source_(source),
        request_(request),
        values_(parse_kept_form("f32", Container::kGguf, request.rule)),
        rule_used_(request.keep.size()) {}

  ConversionPlan plan() {
    GgufLayers layers = gguf_layers(source_.checkpoint(), request_.layers);
    plan_.keys = std::move(layers.keys);
    plan_.forms.push_back(values_);
    std::unique_ptr<WeightSource> weights;
    int64_t current = -1;
    for (GgufLayerTensor& tensor : layers.tensors) {
      if (std::exchange(current, tensor.layer) != tensor.layer) {
        weights = source_.checkpoint().layer_source(tensor.layer);
      }
      add_tensor(*weights, std::move(tensor));
    }
    check_rules();
    fill_shards(units(), request_.shard_bytes, gguf_shard_name, plan_);
    return std::move(plan_);
  }

 private:
  const TargetForm* form_of(const GgufLayerTensor& tensor, const WeightInfo& info) {
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

  // Values keep their type; codes of a directory are not those of a block.
  const TargetForm* form_of_source(const GgufLayerTensor& tensor, const WeightInfo& info) {
    for (const auto& [dtype, name] :
         {std::pair(DType::kF32, "f32"), {DType::kF16, "f16"}, {DType::kBF16, "bf16"}}) {
      if (info.dtype != dtype) continue;
      plan_.forms.push_back(parse_kept_form(name, Container::kGguf, request_.rule));
      return plan_.forms.back().get();
    }
    throw Error(ErrorCode::kUnsupported, {.what = "the source's codes have no place in a GGUF file",
                                          .tensor = tensor.name,
                                          .expected = "a form of GGUF files in place of \"source\"",
                                          .found = std::string(to_string(info.dtype))});
  }

  void add_tensor(const WeightSource& weights, GgufLayerTensor tensor) {
    const WeightInfo info = weights.describe(tensor.id);
    ConvertedModule module{.name = without_ending(tensor.name),
                           .layer = tensor.layer,
                           .rows = info.count * info.rows,
                           .cols = info.cols,
                           .form = form_of(tensor, info),
                           .tensor = tensor.name,
                           .shape = tensor.shape};
    for (int64_t expert = 0; expert < info.count; ++expert) {
      module.parts.push_back({.id = tensor.id, .expert = expert, .rows = info.rows});
    }
    module.form->check(module);
    if (belongs_to_experts(tensor.id)) list_matrices(weights, info, module);
    plan_.modules.push_back(std::move(module));
  }

  void list_matrices(const WeightSource& weights, const WeightInfo& info, ConvertedModule& module) {
    module.source_bytes = bytes_of(weights, module.parts.front().id, info);
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

  std::vector<std::vector<PlannedTensor>> units() const {
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

ConversionPlan plan_gguf_layers(const SourceModel& source, const ConvertRequest& request) {
  return LayersPlanner(source, request).plan();
}

}  // namespace conclave::tool
