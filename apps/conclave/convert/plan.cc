#include "convert/plan.h"

#include "convert/json_edit.h"
#include "output/table.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace conclave::tool {
namespace {

constexpr std::string_view kWeight = ".weight";

bool has_codes(const WeightForm& form) { return !form.method.empty(); }

[[noreturn]] void refuse(std::string what, std::string tensor, std::string found,
                         std::string expected = {}, std::string hint = {}) {
  throw Error(ErrorCode::kUnsupported, {.what = std::move(what),
                                        .tensor = std::move(tensor),
                                        .expected = std::move(expected),
                                        .found = std::move(found),
                                        .hint = std::move(hint)});
}

// Moves all lines but the first to where a member of an object stands.
std::string indented(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c;
    if (c == '\n') out += "  ";
  }
  return out;
}

// A tensor of the source that modules replace.
struct Replaced {
  int64_t matrices = 0;   // that the tensor belongs to
  int64_t converted = 0;  // those of them that modules take
};

class Planner {
 public:
  Planner(const SourceModel& source, const ConvertRequest& request)
      : source_(source), request_(request), rule_used_(request.keep.size()) {}

  ConversionPlan plan() {
    for (const int64_t layer : request_.layers) add_layer(layer);
    check_rules();
    check_replaced();
    check_modules();
    std::vector<std::vector<PlannedTensor>> units = list_units();
    fill_shards(std::move(units));
    plan_.config = make_config();
    return std::move(plan_);
  }

 private:
  // The form of a layer, or none if it keeps its tensors.
  std::optional<WeightForm> form_of(const std::string& module) {
    for (size_t i = 0; i < request_.keep.size(); ++i) {
      if (!matches(request_.keep[i].pattern, module)) continue;
      rule_used_[i] = true;
      return request_.keep[i].form;
    }
    return request_.form;
  }

  void add_layer(int64_t layer) {
    const std::unique_ptr<WeightSource> weights = source_.checkpoint().layer_source(layer);
    for (const StoredMatrix& matrix : source_.checkpoint().stored_matrices(layer)) {
      for (const std::string& tensor : matrix.tensors) ++replaced_[tensor].matrices;
      if (matrix.module.empty()) {
        refuse("the family has no name for a linear layer of these weights",
               weights->locate(matrix.id, matrix.expert),
               source_.checkpoint().layer(layer).layout + ", " + source_.checkpoint().model_type(),
               "tensors of each expert");
      }
      if (const std::optional<WeightForm> form = form_of(matrix.module)) {
        add_matrix(layer, matrix, weights->describe(matrix.id), *form);
      }
    }
  }

  void add_matrix(int64_t layer, const StoredMatrix& matrix, const WeightInfo& info,
                  const WeightForm& form) {
    const auto [known, is_new] =
        module_by_name_.emplace(matrix.module, static_cast<int32_t>(plan_.modules.size()));
    if (is_new) {
      plan_.modules.push_back(
          {.name = matrix.module, .layer = layer, .cols = info.cols, .form = form});
      anchors_[matrix.tensors.front()].push_back(known->second);
    }
    ConvertedModule& module = plan_.modules[static_cast<size_t>(known->second)];
    module.parts.push_back({.id = matrix.id, .expert = matrix.expert, .rows = info.rows});
    module.rows += info.rows;
    for (const std::string& tensor : matrix.tensors) {
      ++replaced_[tensor].converted;
      tensors_of_[known->second].push_back(tensor);
    }
  }

  void check_rules() const {
    for (size_t i = 0; i < rule_used_.size(); ++i) {
      if (rule_used_[i]) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "no linear layer of the experts has such a name",
                   .tensor = "--keep",
                   .expected = "names such as " + first_name(),
                   .found = request_.keep[i].pattern});
    }
    const auto coded = [](const ConvertedModule& module) { return has_codes(module.form); };
    if (std::ranges::any_of(plan_.modules, coded)) return;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "nothing is left to convert", .tensor = "--keep"});
  }

  std::string first_name() const {
    const auto named = source_.checkpoint().stored_matrices(request_.layers.front());
    return named.empty() ? "none" : named.front().module;
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
            source_.find(name)->info->bytes / static_cast<uint64_t>(replaced_.at(name).matrices);
      }
      if (has_codes(module.form)) check_blocks(module);
    }
  }

  // The method has whole groups only, and blocks of fused matrices begin with their rows.
  static void check_blocks(const ConvertedModule& module) {
    const QuantSpec& quant = module.form.quant;
    if (quant.weights != WeightScale::kBlock) return;
    if (quant.block_rows == 1 && module.cols % quant.block_cols != 0) {
      refuse("the rows are not whole groups", module.name, fmt::format("{} columns", module.cols),
             fmt::format("a multiple of {} columns", quant.block_cols), "choose smaller groups");
    }
    for (size_t i = 0; i + 1 < module.parts.size(); ++i) {
      if (module.parts[i].rows % quant.block_rows == 0) continue;
      refuse("a block of scales would hold rows of two fused matrices", module.name,
             fmt::format("{} rows", module.parts[i].rows),
             fmt::format("a multiple of {} rows", quant.block_rows));
    }
  }

  // Tensors that stay together: those of a module, or one that is copied.
  std::vector<std::vector<PlannedTensor>> list_units() {
    std::vector<std::vector<PlannedTensor>> units;
    for (const SourceTensor& tensor : source_.tensors()) {
      const std::string& name = tensor.info->name;
      if (const auto anchored = anchors_.find(name); anchored != anchors_.end()) {
        for (const int32_t module : anchored->second) units.push_back(module_tensors(module));
      }
      if (replaced_.contains(name) || belongs_to_module(name)) continue;
      require_values(tensor);
      add_kept(tensor);
      units.push_back({{.name = name,
                        .dtype = tensor.info->dtype,
                        .shape = tensor.info->shape,
                        .bytes = tensor.info->bytes,
                        .copied = &tensor}});
    }
    return units;
  }

  std::vector<PlannedTensor> module_tensors(int32_t index) {
    const ConvertedModule& module = plan_.modules[static_cast<size_t>(index)];
    if (!has_codes(module.form)) kept_.push_back(module.name);
    std::vector<PlannedTensor> tensors;
    for (FormTensor& tensor : form_tensors(module.form, module.rows, module.cols, module.name)) {
      tensors.push_back({.name = module.name + "." + tensor.name,
                         .dtype = tensor.dtype,
                         .shape = std::move(tensor.shape),
                         .bytes = tensor.bytes,
                         .module = index,
                         .plane = tensor.plane,
                         .content = tensor.content});
    }
    return tensors;
  }

  // Whether the tensor says more of weights that are converted, such as their shape. Biases stay.
  bool belongs_to_module(const std::string& name) const {
    const size_t dot = name.rfind('.');
    if (dot == std::string::npos || name.substr(dot) == ".bias") return false;
    return module_by_name_.contains(name.substr(0, dot));
  }

  // The configuration of the result knows one kind of codes.
  static void require_values(const SourceTensor& tensor) {
    const TensorInfo& info = *tensor.info;
    const bool packed = info.name.ends_with("_packed") || info.name.ends_with("qweight");
    const bool narrow = info.shape.size() > 1 && bit_size(info.dtype) < 16;
    if (!narrow && !packed) return;
    refuse("the tensor stays in codes that the result's configuration would not describe",
           info.name, std::string(to_string(info.dtype)), "values in all that is not converted",
           "convert every layer, from a model whose other weights are values");
  }

  // Linear layers without codes are named in the configuration.
  void add_kept(const SourceTensor& tensor) {
    const std::string& name = tensor.info->name;
    if (tensor.info->shape.size() < 2) return;
    kept_.push_back(name.ends_with(kWeight) ? name.substr(0, name.size() - kWeight.size()) : name);
  }

  void fill_shards(std::vector<std::vector<PlannedTensor>> units) {
    for (std::vector<PlannedTensor>& unit : units) {
      uint64_t bytes = 0;
      for (const PlannedTensor& tensor : unit) bytes += tensor.bytes;
      const bool full =
          plan_.shards.empty() || (plan_.shards.back().bytes + bytes > request_.shard_bytes &&
                                   !plan_.shards.back().tensors.empty());
      if (full) plan_.shards.emplace_back();
      PlannedShard& shard = plan_.shards.back();
      shard.bytes += bytes;
      plan_.bytes += bytes;
      std::move(unit.begin(), unit.end(), std::back_inserter(shard.tensors));
    }
    const size_t count = plan_.shards.size();
    for (size_t i = 0; i < count; ++i) {
      plan_.shards[i].file_name =
          count == 1 ? "model.safetensors"
                     : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count);
    }
  }

  std::string make_config() {
    // Some models tie it to the embedding and store no tensor.
    if (std::ranges::find(kept_, "lm_head") == kept_.end()) kept_.emplace_back("lm_head");
    std::string text = source_.config_text();
    for (const char* key : {"quantization_config", "compression_config"}) {
      text = without_member(text, key);
      const std::string nested(member_text(text, "text_config"));
      if (member_text(nested, key).empty()) continue;
      text = with_member(text, "text_config", without_member(nested, key));
    }
    return with_member(text, "quantization_config",
                       indented(json_text(quantization_config(request_.form, kept_), 2)));
  }

  const SourceModel& source_;
  const ConvertRequest& request_;
  ConversionPlan plan_;
  std::vector<bool> rule_used_;
  std::unordered_map<std::string, int32_t> module_by_name_;
  std::unordered_map<std::string, std::vector<int32_t>> anchors_;  // modules by first tensor
  std::unordered_map<int32_t, std::vector<std::string>> tensors_of_;
  std::map<std::string, Replaced> replaced_;
  std::vector<std::string> kept_;
};

}  // namespace

nlohmann::ordered_json ConversionPlan::index() const {
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  for (const PlannedShard& shard : shards) {
    // Assigning by key would search an ordered object from the front; the names are unique.
    for (const PlannedTensor& tensor : shard.tensors) {
      map.get_ref<nlohmann::ordered_json::object_t&>().push_back({tensor.name, shard.file_name});
    }
  }
  return {{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(map)}};
}

ConversionPlan plan_conversion(const SourceModel& source, const ConvertRequest& request) {
  return Planner(source, request).plan();
}

}  // namespace conclave::tool
