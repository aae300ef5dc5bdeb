#include "convert/trunk_plan.h"

#include "convert/forms/target_form.h"
#include "convert/json_edit.h"
#include "convert/tokenizer/tokenizer_keys.h"
#include "core/weight_types.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

constexpr std::string_view kWeightEnding = ".weight";
constexpr std::string_view kEmbedding = "token_embd.weight";
constexpr std::string_view kLayersAlone =
    "MoE layers alone: experts, routers and what belongs to them. No attention, embedding, norm or "
    "tokenizer.";

std::string upper(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

std::string_view torch_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    default:
      return "bfloat16";
  }
}

std::string name_of(const std::filesystem::path& model) {
  const std::filesystem::path path = std::filesystem::absolute(model).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

// Codes of a directory are described by its configuration, which a file has not.
Support have_values(const SourceModel& source, const std::vector<TrunkTensor>& tensors) {
  for (const TrunkTensor& tensor : tensors) {
    for (const std::string& name : tensor.sources) {
      const SourceTensor& found = *source.find(name);
      const std::optional<DType> plain = parse_dtype(found.type);
      if (plain ? is_plain(*plain) : source.container() == ModelContainer::kGguf) continue;
      return Support::no(fmt::format("{} has codes, {}", name, found.type));
    }
  }
  return Support::yes();
}

}  // namespace

void TrunkPlan::plan_file(std::vector<GgufKey>& keys) {
  if (has_all_layers()) {
    take(gguf_trunk(source_.checkpoint(), source_.config_text(), tensors_of_source(), keys));
  }
  if (!is_whole()) {
    keys.push_back(GgufKey::of_text("general.description", kLayersAlone));
    return;
  }
  keys.push_back(GgufKey::of_text("general.type", "model"));
  keys.push_back(GgufKey::of_text("general.name", name_of(source_.path())));
  std::ranges::copy(trunk_.keys, std::back_inserter(keys));
  const auto embedding = std::ranges::find(trunk_.tensors, kEmbedding, &TrunkTensor::name);
  const Support tokenizer = tokenizer_keys(source_.path(), embedding->shape.front(), keys);
  no_tokenizer_ = tokenizer.reason();
}

void TrunkPlan::plan_directory(const std::string& model_type, std::string& config) {
  if (has_all_layers()) {
    take(directory_trunk(source_.checkpoint(), model_type, config, tensors_of_source()));
  }
  if (!is_whole()) return;
  config = with_member(trunk_.config, "dtype", fmt::format("\"{}\"", torch_name(dtype())));
}

// A part of the layers is no model.
bool TrunkPlan::has_all_layers() {
  if (request_.layers.size() == source_.checkpoint().layers().size()) return true;
  reason_ = "only some of its MoE layers were asked for";
  return false;
}

void TrunkPlan::take(ModelTrunk trunk) {
  const Support values =
      trunk.support ? have_values(source_, trunk.tensors) : std::move(trunk.support);
  if (values) {
    trunk_ = std::move(trunk);
  } else {
    reason_ = values.reason();
  }
}

std::vector<TrunkTensorInfo> TrunkPlan::tensors_of_source() const {
  std::vector<TrunkTensorInfo> infos;
  for (const SourceTensor& tensor : source_.tensors()) {
    infos.push_back({.name = tensor.name, .shape = tensor.shape});
  }
  return infos;
}

// The type of a directory's values beside its experts.
DType TrunkPlan::dtype() const {
  const std::optional<DType> asked = parse_dtype(upper(request_.form->name()));
  return asked && is_plain(*asked) ? *asked : DType::kBF16;
}

// llama.cpp takes vectors as F32 alone; matrices keep their type.
DType TrunkPlan::dtype_of(const TrunkTensor& tensor) const {
  if (request_.container == ModelContainer::kSafetensors) return dtype();
  if (tensor.shape.size() < 2) return DType::kF32;
  return *parse_dtype(source_.find(tensor.sources.front())->type);
}

std::vector<std::vector<PlannedTensor>> TrunkPlan::units(std::vector<std::string>& kept) const {
  std::vector<std::vector<PlannedTensor>> units;
  for (const TrunkTensor& tensor : trunk_.tensors) {
    PlannedTensor planned = dense_tensor(tensor.name, dtype_of(tensor), tensor.shape);
    const SourceTensor* const first = source_.find(tensor.sources.front());
    if (tensor.order == TrunkOrder::kSame && first->type == planned.type) {
      planned.copied = first;
    } else {
      planned.moved = MovedTensor{
          .sources = {}, .order = tensor.order, .heads = tensor.heads, .keys = tensor.keys};
      for (const std::string& name : tensor.sources) {
        planned.moved->sources.push_back(source_.find(name));
      }
    }
    if (tensor.shape.size() > 1) {
      const bool ends = tensor.name.ends_with(kWeightEnding);
      kept.push_back(tensor.name.substr(0, tensor.name.size() - (ends ? kWeightEnding.size() : 0)));
    }
    units.push_back({std::move(planned)});
  }
  return units;
}

}  // namespace conclave::inline v0::conversion
