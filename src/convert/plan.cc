#include "convert/plan.h"

#include "convert/forms/target_form.h"
#include "convert/layers_plan.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

[[noreturn]] void refuse(std::string what, std::string tensor, std::string found,
                         std::string expected = {}, std::string hint = {}) {
  throw Error(ErrorCode::kUnsupported, {.what = std::move(what),
                                        .tensor = std::move(tensor),
                                        .expected = std::move(expected),
                                        .found = std::move(found),
                                        .hint = std::move(hint)});
}

// A tensor of the source that modules replace.
struct Replaced {
  int64_t matrices = 0;   // that the tensor belongs to
  int64_t converted = 0;  // those of them that modules take
};

class Planner {
 public:
  Planner(const SourceModel& source, const ResolvedRequest& request)
      : source_(source), request_(request), rule_used_(request.keep.size()) {}

  ConversionPlan plan() {
    request_.form->check_model(source_.checkpoint());
    for (const int64_t layer : request_.layers) add_layer(layer);
    check_rules();
    check_replaced();
    check_modules();
    list_matrices();
    fill_shards(
        list_units(), request_.shard_bytes,
        [this](size_t i, size_t count) { return source_.shard_name(i, count); }, plan_);
    return std::move(plan_);
  }

 private:
  // The form of a module, or null if it keeps its tensors.
  const TargetForm* form_of(const std::string& module, const SourceTensor& tensor) {
    const TargetForm* form = request_.form.get();
    for (size_t i = 0; i < request_.keep.size(); ++i) {
      if (!matches(request_.keep[i].pattern, module)) continue;
      rule_used_[i] = true;
      form = request_.keep[i].form.get();
      break;
    }
    return form == nullptr || form->is_form_of(tensor) ? nullptr : form;
  }

  void add_layer(int64_t index) {
    const CheckpointLayer& layer = source_.checkpoint().layer(index);
    const std::unique_ptr<WeightSource> weights = source_.checkpoint().layer_source(index);
    for (const StoredMatrix& matrix : source_.checkpoint().stored_matrices(index)) {
      for (const std::string& tensor : matrix.tensors) ++replaced_[tensor].matrices;
      const ModulePlace place = request_.form->place(layer, matrix);
      if (place.module.empty()) {
        refuse("the family has no name for a linear layer of these weights",
               weights->locate(matrix.id, matrix.expert),
               layer.layout + ", " + source_.checkpoint().model_type(), "tensors of each expert");
      }
      const TargetForm* form = form_of(place.module, *source_.find(matrix.tensors.front()));
      if (form == nullptr) continue;
      add_matrix(index, matrix, form->place(layer, matrix), weights->describe(matrix.id), *form);
    }
  }

  void add_matrix(int64_t layer, const StoredMatrix& matrix, const ModulePlace& place,
                  const WeightInfo& info, const TargetForm& form) {
    const std::string& first = matrix.tensors.front();
    const auto [known, is_new] =
        module_by_name_.emplace(place.module, static_cast<int32_t>(plan_.modules.size()));
    if (is_new) {
      plan_.modules.push_back({.name = place.module,
                               .layer = layer,
                               .cols = info.cols,
                               .form = &form,
                               .tensor = first,
                               .shape = source_.find(first)->shape});
      anchors_[first].push_back(known->second);
    }
    ConvertedModule& module = plan_.modules[static_cast<size_t>(known->second)];
    add_part(module, matrix, place, info.rows);
    module.rows += info.rows;
    for (const std::string& tensor : matrix.tensors) {
      ++replaced_[tensor].converted;
      tensors_of_[known->second].push_back(tensor);
    }
  }

  static void add_part(ConvertedModule& module, const StoredMatrix& matrix,
                       const ModulePlace& place, int64_t rows) {
    const auto same = std::ranges::find(module.parts, matrix.expert, &ModulePart::expert);
    if (place.alternates && same != module.parts.end()) {
      same->other = matrix.id;
      same->rows += rows;
      return;
    }
    module.parts.push_back({.id = matrix.id, .expert = matrix.expert, .rows = rows});
  }

  void check_rules() const {
    for (size_t i = 0; i < rule_used_.size(); ++i) {
      if (rule_used_[i]) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "no linear layer of the experts has such a name",
                   .tensor = "keep",
                   .expected = "names such as " + first_name(),
                   .found = request_.keep[i].pattern});
    }
    const auto coded = [](const ConvertedModule& module) { return module.form->has_codes(); };
    if (std::ranges::any_of(plan_.modules, coded)) return;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "nothing is left to convert",
                 .expected = "experts that do not have the form already, and are not kept",
                 .found = request_.form->name()});
  }

  std::string first_name() const {
    const int64_t layer = request_.layers.front();
    const auto named = source_.checkpoint().stored_matrices(layer);
    if (named.empty()) return "none";
    return request_.form->place(source_.checkpoint().layer(layer), named.front()).module;
  }

  // A matrix that shares a tensor with converted ones would be lost.
  void check_replaced() {
    std::erase_if(replaced_, [](const auto& entry) { return entry.second.converted == 0; });
    for (const auto& [name, stored] : replaced_) {
      if (stored.converted == stored.matrices) continue;
      refuse("the tensor also holds matrices that are not converted", name,
             fmt::format("{} of {} matrices", stored.converted, stored.matrices),
             "a tensor of converted matrices alone");
    }
  }

  void check_modules() {
    for (size_t i = 0; i < plan_.modules.size(); ++i) {
      ConvertedModule& module = plan_.modules[i];
      for (const std::string& name : tensors_of_[static_cast<int32_t>(i)]) {
        module.source_bytes +=
            source_.find(name)->bytes / static_cast<uint64_t>(replaced_.at(name).matrices);
      }
      module.form->check(module);
    }
  }

  // Parts of one expert are reported as one matrix.
  void list_matrices() {
    for (size_t i = 0; i < plan_.modules.size(); ++i) {
      std::map<int64_t, size_t> by_expert;
      for (ModulePart& part : plan_.modules[i].parts) {
        const auto [known, is_new] = by_expert.emplace(part.expert, plan_.matrices.size());
        if (is_new) {
          plan_.matrices.push_back({.name = plan_.modules[i].name,
                                    .module = static_cast<int32_t>(i),
                                    .kind = to_string(part.id)});
        }
        PlannedMatrix& matrix = plan_.matrices[known->second];
        if (!is_new || part.other) matrix.kind = to_string(plan_.modules[i].parts[0].id) + "_up";
        matrix.rows += part.rows;
        part.matrix = known->second;
      }
      if (by_expert.size() == 1) continue;
      for (const auto& [expert, at] : by_expert) {
        plan_.matrices[at].name += fmt::format("[{}]", expert);
      }
    }
  }

  // Tensors that stay together: those of a module, or one that is copied.
  std::vector<std::vector<PlannedTensor>> list_units() {
    std::vector<std::vector<PlannedTensor>> units;
    for (const SourceTensor& tensor : source_.tensors()) {
      if (const auto anchored = anchors_.find(tensor.name); anchored != anchors_.end()) {
        for (const int32_t module : anchored->second) units.push_back(module_tensors(module));
      }
      if (replaced_.contains(tensor.name) || belongs_to_module(tensor)) continue;
      source_.require_copyable(tensor);
      add_kept(tensor);
      units.push_back({{.name = tensor.name,
                        .type = tensor.type,
                        .shape = tensor.shape,
                        .bytes = tensor.bytes,
                        .copied = &tensor}});
    }
    return units;
  }

  std::vector<PlannedTensor> module_tensors(int32_t index) {
    const ConvertedModule& module = plan_.modules[static_cast<size_t>(index)];
    if (!module.form->has_codes()) plan_.kept.push_back(module.name);
    std::vector<PlannedTensor> tensors = module.form->tensors(module);
    for (PlannedTensor& tensor : tensors) tensor.module = index;
    return tensors;
  }

  // Whether the tensor says more of weights that are converted.
  bool belongs_to_module(const SourceTensor& tensor) const {
    const size_t dot = tensor.name.rfind('.');
    return dot != std::string::npos && source_.goes_with_weights(tensor) &&
           module_by_name_.contains(tensor.name.substr(0, dot));
  }

  // Linear layers without codes are named in the configuration.
  void add_kept(const SourceTensor& tensor) {
    if (tensor.shape.size() >= 2) plan_.kept.push_back(linear_layer_of(tensor.name));
  }

  const SourceModel& source_;
  const ResolvedRequest& request_;
  ConversionPlan plan_;
  std::vector<bool> rule_used_;
  std::unordered_map<std::string, int32_t> module_by_name_;
  std::unordered_map<std::string, std::vector<int32_t>> anchors_;  // modules by first tensor
  std::unordered_map<int32_t, std::vector<std::string>> tensors_of_;
  std::map<std::string, Replaced> replaced_;
};

}  // namespace

std::string linear_layer_of(const std::string& tensor) {
  constexpr std::string_view kWeight = ".weight";
  return tensor.ends_with(kWeight) ? tensor.substr(0, tensor.size() - kWeight.size()) : tensor;
}

void fill_shards(std::vector<std::vector<PlannedTensor>> units, uint64_t shard_bytes,
                 const std::function<std::string(size_t index, size_t count)>& name_of,
                 ConversionPlan& plan) {
  for (std::vector<PlannedTensor>& unit : units) {
    uint64_t bytes = 0;
    for (const PlannedTensor& tensor : unit) bytes += tensor.bytes;
    const bool full = plan.shards.empty() || (plan.shards.back().bytes + bytes > shard_bytes &&
                                              !plan.shards.back().tensors.empty());
    if (full) plan.shards.emplace_back();
    PlannedShard& shard = plan.shards.back();
    shard.bytes += bytes;
    plan.bytes += bytes;
    std::move(unit.begin(), unit.end(), std::back_inserter(shard.tensors));
  }
  const size_t count = plan.shards.size();
  for (size_t i = 0; i < count; ++i) plan.shards[i].file_name = name_of(i, count);
}

ConversionPlan plan_conversion(const SourceModel& source, const ResolvedRequest& request) {
  if (request.container != source.container()) return plan_layers(source, request);
  return Planner(source, request).plan();
}

}  // namespace conclave::inline v0::conversion
