#include "conclave/directory_layers.h"

#include "checkpoint/config_writer.h"
#include "checkpoint/generic_names.h"
#include "checkpoint/gguf/family.h"
#include "checkpoint/gguf/written_family.h"
#include "checkpoint/layer_names.h"
#include "checkpoint/model_config.h"
#include "checkpoint/tensor_name.h"
#include "io/json.h"

#include "conclave/error.h"
#include "conclave/gguf_layers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

namespace conclave::inline v0 {
namespace {

using checkpoint::Architecture;
using checkpoint::AxisOrder;
using checkpoint::DescribedLayer;
using checkpoint::ExpertAxis;
using checkpoint::ExpertForm;
using checkpoint::NamePattern;
using checkpoint::RowOrder;

constexpr std::string_view kGgufPrefix = "gguf ";
constexpr std::string_view kTrunk = "model.";

// A family that could say what the layers are.
struct Candidate {
  std::string_view model_type;
  const Architecture* table = nullptr;
};

std::vector<Candidate> candidates_of(const Checkpoint& model) {
  std::string_view architecture = model.architecture();
  if (!architecture.starts_with(kGgufPrefix)) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "only a GGUF file's layers are described anew",
                 .file = model.directory().string(),
                 .expected = "a GGUF file",
                 .found = model.architecture()});
  }
  architecture.remove_prefix(kGgufPrefix.size());
  std::vector<std::string_view> types = {model.model_type()};
  for (const std::string_view type : checkpoint::written_model_types(architecture)) {
    if (std::ranges::find(types, type) == types.end()) types.push_back(type);
  }
  std::vector<Candidate> candidates;
  for (const std::string_view type : types) {
    const Architecture* const table = checkpoint::find_architecture(type);
    if (table != nullptr) candidates.push_back({.model_type = type, .table = table});
  }
  return candidates;
}

std::vector<DescribedLayer> described(const Checkpoint& model, std::span<const int64_t> layers) {
  std::vector<DescribedLayer> list;
  for (const int64_t layer : layers) {
    list.push_back({.index = layer, .spec = model.layer(layer).spec});
  }
  return list;
}

// Whether the reader takes the configuration for what it was written of.
Support reads_back(const std::string& config, std::span<const DescribedLayer> layers) {
  const io::JsonDocument document =
      io::JsonDocument::parse(config, "config.json", io::kConfigLimits);
  const checkpoint::ModelConfig model = checkpoint::read_model_config(document.root());
  if (!model.support) return model.support;
  const bool same_layers = std::ranges::equal(
      model.layers, layers, {}, &checkpoint::LayerConfig::index, &DescribedLayer::index);
  if (!same_layers) return Support::no("other layers have experts");
  for (size_t i = 0; i < layers.size(); ++i) {
    if (!model.layers[i].support) return model.layers[i].support;
    MoeSpec read = model.layers[i].spec;
    if (model.architecture->router.selection_bias_by_file) {
      read.router.has_selection_bias = layers[i].spec.router.has_selection_bias;
    }
    const Support same = means_the_same(layers[i].spec, read);
    if (!same) return same;
  }
  return Support::yes();
}

Support try_candidate(const Candidate& candidate, const Checkpoint& model,
                      std::span<const DescribedLayer> layers, std::string& config) {
  const auto* const family = checkpoint::find_written_family(candidate.model_type);
  const bool has_shared = std::ranges::any_of(
      layers, [](const DescribedLayer& layer) { return layer.spec.shared.intermediate_size > 0; });
  if (family != nullptr && family->has_no_shared && has_shared) {
    return Support::no("its layers have no shared experts");
  }
  config = checkpoint::write_config(*candidate.table, candidate.model_type,
                                    model.num_hidden_layers(), layers);
  try {
    return reads_back(config, layers);
  } catch (const Error& error) {
    return Support::no(error.detail().what);
  }
}

[[noreturn]] void refuse_family(const Checkpoint& model, std::span<const std::string> reasons) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "no configuration of a known family has these layers",
               .file = model.directory().string(),
               .expected = "layers that a family of docs/models.md has",
               .found = reasons.empty()
                            ? fmt::format("{}: no family of this name is known", model.model_type())
                            : fmt::format("{}", fmt::join(reasons, "; ")),
               .hint = "it becomes a GGUF file of another type: give one of their formats"});
}

bool has_own_meaning(WeightId id) {
  return !id.plane() || *id.plane() == WeightPlane::kWeights || *id.plane() == WeightPlane::kBias;
}

// An index is no value: the table of a hash router holds these.
bool is_index(DType dtype) { return dtype == DType::kI32 || dtype == DType::kI64; }

bool is_alone(const NamePattern& pattern, WeightId id) {
  const auto ids = checkpoint::ids_of(pattern.part);
  return ids.size() == 1 && ids.front() == id && pattern.rows_beside == 1;
}

const NamePattern* find_expert_pattern(const ExpertForm& form, WeightId id) {
  const auto found = std::ranges::find_if(form.patterns, [&](const NamePattern& pattern) {
    return is_alone(pattern, id) && checkpoint::has_expert_placeholder(pattern.text);
  });
  return found == form.patterns.end() ? nullptr : &*found;
}

// The family's own pattern for a stack of these experts' matrices, or for two of a shared expert.
const NamePattern* find_published_stack(const Architecture& table, WeightId id) {
  if (table.ambiguous_stack == checkpoint::StackOrder::kColsFirst) return nullptr;
  const auto is_stack = [&](const NamePattern& pattern) {
    const auto ids = checkpoint::ids_of(pattern.part);
    return std::ranges::find(ids, id) != ids.end() && pattern.axes != AxisOrder::kColsFirst &&
           pattern.rows == RowOrder::kConcatenated && pattern.experts == ExpertAxis::kOwn &&
           !checkpoint::has_expert_placeholder(pattern.text);
  };
  if (id.mlp() == WeightMlp::kRouted) {
    if (table.expert_forms.size() != 1) return nullptr;
    const auto& patterns = table.expert_forms.front().patterns;
    const auto found = std::ranges::find_if(patterns, is_stack);
    return found == patterns.end() ? nullptr : &*found;
  }
  const auto found = std::ranges::find_if(table.once, [&](const NamePattern& pattern) {
    return is_stack(pattern) && checkpoint::ids_of(pattern.part).size() == 2;
  });
  return found == table.once.end() ? nullptr : &*found;
}

// The names of one layer's weights in a family.
class LayerNames {
 public:
  LayerNames(const Architecture& table, const WeightSource& source) : table_(table) {
    std::vector<WeightId> routed;
    for (const WeightId id : weights::kAll) {
      const bool has = has_own_meaning(id) && source.describe(id).count > 0;
      if (has && id.mlp() == WeightMlp::kRouted) routed.push_back(id);
    }
    checkpoint::for_each_form(table, [&](const ExpertForm& form) {
      const bool fits = std::ranges::all_of(
          routed, [&](WeightId id) { return find_expert_pattern(form, id) != nullptr; });
      if (form_ == nullptr && fits) form_ = &form;
    });
  }

  // Null if the family has no tensor of this weight alone.
  const NamePattern* find(WeightId id) const {
    if (id.mlp() == WeightMlp::kRouted) {
      return form_ == nullptr ? nullptr : find_expert_pattern(*form_, id);
    }
    const NamePattern* found = nullptr;
    checkpoint::for_each_once(table_, [&](const NamePattern& pattern) {
      if (found == nullptr && is_alone(pattern, id)) found = &pattern;
    });
    return found;
  }

  std::string full(const NamePattern& pattern, int64_t layer, int64_t expert) const {
    return fmt::format("{}{}.{}.{}", kTrunk, table_.layers, layer,
                       checkpoint::render_name(pattern, table_.bases.front(), expert));
  }

 private:
  const Architecture& table_;
  const ExpertForm* form_ = nullptr;  // the first with a name for each matrix of an expert
};

bool is_matrix(WeightId id) {
  if (id.mlp()) return id.plane() == WeightPlane::kWeights;
  return id == weights::kRouter || id == weights::kSharedExpertGate || id == weights::kLatentDown ||
         id == weights::kLatentUp;
}

// True if the weight lies in a stack, which is added with the first of its matrices.
bool add_to_stack(const WeightSource& source, const Architecture& table, const LayerNames& names,
                  int64_t layer, WeightId id, std::vector<DirectoryTensor>& tensors) {
  const NamePattern* const stack = find_published_stack(table, id);
  if (stack == nullptr) return false;
  const auto ids = checkpoint::ids_of(stack->part);
  if (ids.front() != id) return true;
  const WeightInfo info = source.describe(id);
  DirectoryTensor tensor{.name = names.full(*stack, layer, 0),
                         .layer = layer,
                         .id = id,
                         .experts = info.count,
                         .shape = {info.rows * std::ssize(ids), info.cols}};
  if (ids.size() == 2) tensor.other = ids.back();
  if (id.mlp() == WeightMlp::kRouted) tensor.shape.insert(tensor.shape.begin(), info.count);
  tensors.push_back(std::move(tensor));
  return true;
}

void add_layer(const Checkpoint& model, const Candidate& family, int64_t layer,
               DirectoryStacks stacks, std::vector<DirectoryTensor>& tensors) {
  const std::unique_ptr<WeightSource> source = model.layer_source(layer);
  const LayerNames names(*family.table, *source);
  for (const WeightId id : weights::kAll) {
    const WeightInfo info = source->describe(id);
    if (info.count == 0 || !has_own_meaning(id)) continue;
    const bool may_be_stacked =
        stacks == DirectoryStacks::kAsPublished && id.plane() == WeightPlane::kWeights;
    if (may_be_stacked && add_to_stack(*source, *family.table, names, layer, id, tensors)) continue;
    const NamePattern* const pattern = names.find(id);
    if (pattern == nullptr || is_index(info.dtype)) {
      throw Error(ErrorCode::kUnsupported,
                  {.what = fmt::format("{} has no tensor for a weight of layer {}",
                                       family.model_type, layer),
                   .file = model.directory().string(),
                   .tensor = source->locate(id, 0),
                   .found = to_string(id)});
    }
    for (int64_t expert = 0; expert < info.count; ++expert) {
      tensors.push_back({.name = names.full(*pattern, layer, expert),
                         .layer = layer,
                         .id = id,
                         .expert = expert,
                         .shape = is_matrix(id) || pattern->is_one_row
                                      ? std::vector{info.rows, info.cols}
                                      : std::vector{info.rows * info.cols}});
    }
  }
}

}  // namespace

DirectoryLayers directory_layers(const Checkpoint& model, std::span<const int64_t> layers,
                                 DirectoryStacks stacks) {
  const std::vector<DescribedLayer> wanted = described(model, layers);
  std::vector<std::string> reasons;
  for (const Candidate& family : candidates_of(model)) {
    DirectoryLayers written;
    written.model_type = family.model_type;
    const Support readable = try_candidate(family, model, wanted, written.config);
    if (!readable) {
      reasons.push_back(fmt::format("{}: {}", family.model_type, readable.reason()));
      continue;
    }
    for (const int64_t layer : layers) add_layer(model, family, layer, stacks, written.tensors);
    return written;
  }
  refuse_family(model, reasons);
}

}  // namespace conclave::inline v0
