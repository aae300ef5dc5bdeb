#include "checkpoint/model_config.h"

#include "checkpoint/config_reader.h"
#include "checkpoint/name_list.h"
#include "checkpoint/quantization_keys.h"
#include "checkpoint/tensor_name.h"
#include "core/weight_types.h"
#include "io/text.h"
#include "quant/weight_format.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>

namespace conclave::inline v0::checkpoint {
namespace {

// Keys under which composite models keep the configuration of their language model.
constexpr std::array<std::string_view, 4> kNestedConfigs = {"text_config", "thinker_config",
                                                            "llm_config", "language_config"};

// Returns the root, then the configurations nested in it, outermost first.
std::vector<io::JsonValue> config_chain(const io::JsonValue& root) {
  std::vector<io::JsonValue> chain = {root};
  for (bool deeper = true; deeper;) {
    deeper = false;
    for (std::string_view name : kNestedConfigs) {
      const auto nested = chain.back().find_set(name);
      if (!nested || !nested->is_object()) continue;
      chain.push_back(*nested);
      deeper = true;
      break;
    }
  }
  return chain;
}

struct FamilyMatch {
  const Architecture* architecture = nullptr;
  std::string model_type;
};

[[noreturn]] void reject_family(std::string file, std::span<const std::string> types) {
  const std::vector<std::string> known = known_model_types();
  std::vector<std::string> shown;
  std::optional<std::string> nearest;
  for (const std::string& type : types) {
    shown.push_back(io::show_text(type));
    if (!nearest) nearest = nearest_name(type, known);
  }
  throw Error(ErrorCode::kUnknownArchitecture,
              {.what = "model_type names no known architecture",
               .file = std::move(file),
               .expected = fmt::format("one of {}", fmt::join(known, ", ")),
               .found = first_few(shown),
               .hint = (nearest ? "the nearest known name is " + *nearest + "; " : "") +
                       "docs/adding-an-architecture.md shows how to add a table for a family"});
}

// Whether any key, at any depth, mentions experts: "num_local_experts", "moe_layers".
bool names_experts(const io::JsonValue& config) {
  if (!config.is_object()) return false;
  for (const io::JsonMember& member : config.members()) {
    std::string key(member.key);
    std::transform(key.begin(), key.end(), key.begin(),
                   [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
    if (key.find("expert") != std::string::npos || key.find("moe") != std::string::npos)
      return true;
    if (names_experts(member.value)) return true;
  }
  return false;
}

[[noreturn]] void reject_dense_model(const io::JsonValue& root,
                                     std::span<const std::string> types) {
  std::vector<std::string> shown;
  for (const std::string& type : types) shown.push_back(io::show_text(type));
  throw Error(
      ErrorCode::kUnknownArchitecture,
      {.what = "the model has no MoE layers: no key of its configuration speaks of experts",
       .file = root.file(),
       .expected = "a Mixture-of-Experts model",
       .found = fmt::format("model_type {}", first_few(shown)),
       .hint = "there is nothing to run in a dense model; docs/models.md lists the families"});
}

// The outermost known type decides: it may differ from that of the language model inside.
FamilyMatch match_family(const std::vector<io::JsonValue>& chain) {
  std::vector<std::string> found;
  for (const io::JsonValue& config : chain) {
    const auto value = config.find_set("model_type");
    if (!value) continue;
    std::string type(value->as_string());
    if (const Architecture* architecture = find_architecture(type)) {
      return {.architecture = architecture, .model_type = std::move(type)};
    }
    found.push_back(std::move(type));
  }
  const io::JsonValue& root = chain.front();
  if (found.empty()) {
    throw Error(ErrorCode::kConfigMissingKey,
                {.what = "the key model_type is missing",
                 .file = root.file(),
                 .expected = "the name of a model family",
                 .hint = "is this the config.json of a Hugging Face model?"});
  }
  if (!names_experts(root)) reject_dense_model(root, found);
  reject_family(root.file(), found);
}

// The part of the chain that holds the sizes.
const io::JsonValue& sized_config(const std::vector<io::JsonValue>& chain,
                                  const Architecture& architecture) {
  const SizeKeys& sizes = architecture.sizes;
  for (const KeyNames* key : {&sizes.num_experts, &sizes.num_layers}) {
    for (const io::JsonValue& config : chain) {
      if (ConfigReader(config, sizes.lists).find(*key)) return config;
    }
  }
  return chain.front();
}

std::optional<DType> read_dtype(const std::vector<io::JsonValue>& chain,
                                std::vector<std::string>& notes) {
  for (auto config = chain.rbegin(); config != chain.rend(); ++config) {
    const auto value = ConfigReader(*config, {}).find({"dtype", "torch_dtype"});
    if (!value) continue;
    std::string_view name = value->as_string();
    if (name.starts_with("torch.")) name.remove_prefix(6);
    const std::optional<DType> dtype = parse_dtype(name);
    if (dtype && is_plain(*dtype)) return dtype;
    notes.push_back(fmt::format("{} {} is not a type layers run in; the router's own is used",
                                value->path(), io::show_text(name)));
  }
  return std::nullopt;
}

LayerConfig read_layer(const ConfigReader& reader, const Architecture& architecture, int64_t index,
                       std::optional<DType> dtype) {
  LayerConfig layer{.index = index};
  layer.spec = read_spec(reader, architecture, index, dtype, layer.support);
  return layer;
}

// The first text of that name, the outermost first; empty if there is none.
std::string text_in_chain(const std::vector<io::JsonValue>& chain, std::string_view key) {
  for (const io::JsonValue& config : chain) {
    const auto value = config.find_set(key);
    if (value && value->is_string()) return std::string(value->as_string());
  }
  return {};
}

Quantization find_quantization(const std::vector<io::JsonValue>& chain) {
  for (const io::JsonValue& config : chain) {
    if (const auto value = find_quantization_settings(config)) {
      return read_quantization(*value, text_in_chain(chain, "expert_dtype"));
    }
  }
  return {};
}

}  // namespace

void reject_model_type(std::string_view model_type) {
  const std::string type(model_type);
  reject_family({}, std::span(&type, 1));
}

void set_stored_rounding(const ModelConfig& config, DType stored, RouterSpec& router) {
  const RouterRule& rule = config.architecture->router;
  const auto is_open = [&](RouterPrecision precision) {
    return precision == RouterPrecision::kStored ||
           (precision == RouterPrecision::kModel && !config.dtype);
  };
  if (is_open(rule.logits)) router.logits_dtype = stored;
  if (is_open(rule.scores)) router.score_dtype = stored;
}

std::string quantization_reason(std::string_view method) {
  std::vector<std::string_view> methods;
  for (const Method& known : known_methods()) {
    if (known.experts.empty()) methods.push_back(known.name);
  }
  return fmt::format("quantised with {}; this version runs {} weights of {}", method,
                     quant::known_formats(true), fmt::join(methods, ", "));
}

void set_quantization(const Quantization& found, ModelConfig& model) {
  if (found.method.empty()) return;
  model.quant_method = found.method;
  if (found.weights) {
    model.quant = found.weights;
    if (!found.weights->note.empty()) model.notes.emplace_back(found.weights->note);
    return;
  }
  model.quantization = found.method;
  if (!found.reason.empty()) model.quantization += " (" + found.reason + ")";
  model.support = Support::no(quantization_reason(model.quantization));
}

ModelConfig read_model_config(const io::JsonValue& root, ExpertSet experts) {
  if (!root.is_object()) {
    root.reject(ErrorCode::kJsonType, "a model configuration has the wrong type", "an object");
  }
  const std::vector<io::JsonValue> chain = config_chain(root);
  FamilyMatch family = match_family(chain);
  const io::JsonValue& config = sized_config(chain, *family.architecture);
  if (family.architecture->choose != nullptr) {
    const Architecture* other = family.architecture->choose(ConfigReader(config, {}));
    if (other != nullptr) family.architecture = other;
  }
  if (experts == ExpertSet::kVision) {
    if (family.architecture->vision == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "layers of this family have one set of experts",
                   .file = root.file(),
                   .expected = "ExpertSet::kText",
                   .found = "ExpertSet::kVision"});
    }
    family.architecture = family.architecture->vision;
  }
  const Architecture& architecture = *family.architecture;
  const ConfigReader reader(config, architecture.sizes.lists);

  ModelConfig model;
  model.architecture = family.architecture;
  model.model_type = std::move(family.model_type);
  model.num_hidden_layers = read_num_layers(reader, architecture);
  model.dtype = read_dtype(chain, model.notes);
  for (int64_t layer : moe_layers(reader, architecture, model.num_hidden_layers)) {
    model.layers.push_back(read_layer(reader, architecture, layer, model.dtype));
  }
  if (model.layers.empty()) model.notes.push_back("the configuration makes every layer dense");
  set_quantization(find_quantization(chain), model);
  return model;
}

void add_extra_layers(const io::JsonValue& root, std::span<const int64_t> layers,
                      ModelConfig& model) {
  const Architecture& architecture = *model.architecture;
  const ConfigReader reader(sized_config(config_chain(root), architecture),
                            architecture.sizes.lists, model.num_hidden_layers);
  for (int64_t layer : layers) {
    model.layers.push_back(read_layer(reader, architecture, layer, model.dtype));
  }
}

}  // namespace conclave::inline v0::checkpoint
