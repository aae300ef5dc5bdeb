#include "checkpoint/model_config.h"

#include "io/text.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

namespace conclave::inline v0::checkpoint {
namespace {

// Where composite models keep the configuration of their language model.
constexpr std::array<std::string_view, 4> kNestedConfigs = {"text_config", "thinker_config",
                                                            "llm_config", "language_config"};
constexpr std::array<std::string_view, 2> kQuantizationKeys = {"quantization_config",
                                                               "compression_config"};
// Names of hidden_act on the left, rows of the activation list on the right.
struct ActivationName {
  std::string_view config;
  std::string_view row;
};
constexpr std::array kActivations = {ActivationName{"silu", "silu"},
                                     ActivationName{"swish", "silu"}};

std::string render(const io::JsonValue& value) {
  switch (value.type()) {
    case io::JsonType::kBool:
      return value.as_bool() ? "true" : "false";
    case io::JsonType::kInteger:
      return std::to_string(value.as_int64());
    case io::JsonType::kFloat:
      return fmt::format("{}", value.as_double());
    case io::JsonType::kString:
      return io::show_text(value.as_string());
    default:
      return std::string(io::to_string(value.type()));
  }
}

[[noreturn]] void reject_value(const io::JsonValue& value, std::string limit) {
  const std::string fault = value.is_integer() ? " is out of range" : " is not an integer";
  throw Error(ErrorCode::kConfigValue, {.what = value.path() + fault,
                                        .file = value.file(),
                                        .found = render(value),
                                        .limit = std::move(limit)});
}

std::optional<io::JsonValue> find_key(const io::JsonValue& config, const KeyNames& key) {
  for (std::string_view name : key.names()) {
    if (auto value = config.find_set(name)) return value;
  }
  return std::nullopt;
}

io::JsonValue require_key(const io::JsonValue& config, const KeyNames& key) {
  if (auto value = find_key(config, key)) return *value;
  const std::string where = config.path().empty() ? "" : config.path() + ".";
  std::string spellings;
  for (std::string_view name : key.names()) {
    spellings += (spellings.empty() ? "" : " or ") + where + std::string(name);
  }
  throw Error(ErrorCode::kConfigMissingKey, {.what = "the key " + spellings + " is missing",
                                             .file = config.file(),
                                             .expected = "an integer"});
}

int64_t checked_size(const io::JsonValue& value, int64_t low, int64_t high, std::string_view why) {
  const std::string limit = fmt::format("an integer from {} to {}{}", low, high, why);
  if (!value.is_integer()) reject_value(value, limit);
  const int64_t size = value.as_int64();
  if (size < low || size > high) reject_value(value, limit);
  return size;
}

int64_t read_size(const io::JsonValue& config, const KeyNames& key, int64_t high,
                  std::string_view why = "") {
  return checked_size(require_key(config, key), 1, high, why);
}

// The root, then the configurations nested in it, outermost first.
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
  const Architecture* architecture;
  std::string model_type;
};

FamilyMatch match_family(const std::vector<io::JsonValue>& chain) {
  std::string found;
  for (const io::JsonValue& config : chain) {
    const auto value = config.find_set("model_type");
    if (!value) continue;
    const std::string type(value->as_string());
    if (const Architecture* architecture = find_architecture(type)) return {architecture, type};
    found += (found.empty() ? "" : ", ") + io::show_text(type);
  }
  const io::JsonValue& root = chain.front();
  if (found.empty()) {
    throw Error(ErrorCode::kConfigMissingKey,
                {.what = "the key model_type is missing",
                 .file = root.file(),
                 .expected = "the name of a model family",
                 .hint = "is this the config.json of a Hugging Face model?"});
  }
  throw Error(ErrorCode::kUnknownArchitecture,
              {.what = "model_type names no known architecture",
               .file = root.file(),
               .expected = fmt::format("one of {}", fmt::join(known_model_types(), ", ")),
               .found = found,
               .hint = "docs/adding-an-architecture.md shows how to add a table for a family"});
}

// The part of the chain that holds the sizes.
const io::JsonValue& sized_config(const std::vector<io::JsonValue>& chain) {
  for (const io::JsonValue& config : chain) {
    if (config.find_set("num_hidden_layers")) return config;
  }
  return chain.front();
}

std::optional<DType> read_dtype(const std::vector<io::JsonValue>& chain,
                                std::vector<std::string>& notes) {
  for (auto config = chain.rbegin(); config != chain.rend(); ++config) {
    const auto value = find_key(*config, {"dtype", "torch_dtype"});
    if (!value) continue;
    std::string_view name = value->as_string();
    if (name.starts_with("torch.")) name.remove_prefix(6);
    const std::optional<DType> dtype = parse_dtype(name);
    if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16) return dtype;
    notes.push_back(fmt::format("{} {} is not a type layers run in; the router's own is used",
                                value->path(), io::show_text(name)));
  }
  return std::nullopt;
}

std::string read_quantization(const std::vector<io::JsonValue>& chain) {
  for (const io::JsonValue& config : chain) {
    for (std::string_view key : kQuantizationKeys) {
      const auto value = config.find_set(key);
      if (!value) continue;
      const auto method = value->find_set("quant_method");
      return method ? io::show_name(method->as_string())
                    : "a method that " + value->path() + " does not name";
    }
  }
  return {};
}

RouterSpec read_router(const io::JsonValue& config, const RouterRule& rule) {
  bool renormalize = rule.renormalize_default;
  if (const auto value = find_key(config, rule.renormalize_key)) renormalize = value->as_bool();
  RouterSpec router;
  router.score = rule.score;
  router.renormalize = renormalize ? Renormalize::kSum : Renormalize::kNone;
  return router;
}

ActivationSpec read_activation(const io::JsonValue& config, const KeyNames& key, Support& support) {
  const auto value = find_key(config, key);
  if (!value) return {};
  const std::string name(value->as_string());
  for (const ActivationName& known : kActivations) {
    if (known.config == name) return {.name = std::string(known.row)};
  }
  support = Support::no(fmt::format("{} {} is not an activation this version runs (it runs silu)",
                                    value->path(), io::show_text(name)));
  return {.name = name};
}

MoeSpec read_spec(const io::JsonValue& config, const Architecture& architecture, Support& support) {
  const SizeKeys& keys = architecture.sizes;
  MoeSpec spec;
  spec.num_experts = read_size(config, keys.num_experts, kMaxExperts);
  spec.top_k = read_size(config, keys.top_k, spec.num_experts, ", the number of experts");
  spec.hidden_size = read_size(config, "hidden_size", kMaxWidth);
  spec.intermediate_size = read_size(config, keys.intermediate_size, kMaxWidth);
  spec.router = read_router(config, architecture.router);
  spec.activation = read_activation(config, architecture.activation, support);
  if (architecture.shared != SharedMode::kNone) {
    spec.shared.mode = architecture.shared;
    spec.shared.intermediate_size = read_size(config, keys.shared_intermediate_size, kMaxWidth);
  }
  return spec;
}

std::vector<int64_t> moe_layers(const io::JsonValue& config, const LayerRule& rule, int64_t count) {
  std::set<int64_t> dense;
  if (const auto list = find_key(config, rule.dense_layers)) {
    for (const io::JsonValue& item : list->items()) {
      dense.insert(checked_size(item, 0, kMaxHiddenLayers, ""));
    }
  }
  int64_t step = 1;
  if (const auto value = find_key(config, rule.sparse_step)) {
    step = checked_size(*value, 1, kMaxHiddenLayers, "");
  }
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < count; ++layer) {
    if ((layer + 1) % step == 0 && !dense.contains(layer)) layers.push_back(layer);
  }
  return layers;
}

}  // namespace

std::string quantization_reason(std::string_view method) {
  return fmt::format("quantised with {}; this version runs unquantised f32, f16 and bf16 weights",
                     method);
}

ModelConfig read_model_config(const io::JsonValue& root) {
  if (!root.is_object()) {
    root.reject(ErrorCode::kJsonType, "a model configuration has the wrong type", "an object");
  }
  const std::vector<io::JsonValue> chain = config_chain(root);
  FamilyMatch family = match_family(chain);
  const io::JsonValue& config = sized_config(chain);
  const Architecture& architecture = *family.architecture;

  ModelConfig model;
  model.architecture = family.architecture;
  model.model_type = std::move(family.model_type);
  model.num_hidden_layers = read_size(config, "num_hidden_layers", kMaxHiddenLayers);
  model.dtype = read_dtype(chain, model.notes);
  MoeSpec spec = read_spec(config, architecture, model.support);
  // These families compute the gate product in the model's type.
  if (model.dtype) spec.router.logits_dtype = *model.dtype;
  for (int64_t layer : moe_layers(config, architecture.layer_rule, model.num_hidden_layers)) {
    model.layers.push_back({.index = layer, .spec = spec});
  }
  if (model.layers.empty()) model.notes.push_back("the configuration makes every layer dense");
  model.quantization = read_quantization(chain);
  if (!model.quantization.empty()) {
    model.support = Support::no(quantization_reason(model.quantization));
  }
  return model;
}

}  // namespace conclave::inline v0::checkpoint
