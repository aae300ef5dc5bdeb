#include "synth/layout.h"

#include "conclave/error.h"
#include "conclave/format.h"
#include "conclave/methods.h"
#include "conclave/synthetic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace conclave::tool {
namespace {

enum class SharedPart : uint8_t { kNever, kAlways };

// The names that transformers uses for one family's tensors and config keys.
struct Family {
  const char* model_type;
  const char* class_name;
  const char* block;  // between "model.layers.N." and the tensors
  const char* gate;   // per expert
  const char* up;
  const char* down;
  const char* experts_key;
  const char* intermediate_key;
  SharedPart shared;
  bool has_norm_topk_prob;  // the others always renormalise
  Renormalize usual;        // in published models
};

constexpr Family kFamilies[] = {
    {"mixtral", "MixtralForCausalLM", "block_sparse_moe", "w1", "w3", "w2", "num_local_experts",
     "intermediate_size", SharedPart::kNever, false, Renormalize::kSum},
    {"olmoe", "OlmoeForCausalLM", "mlp", "gate_proj", "up_proj", "down_proj", "num_experts",
     "intermediate_size", SharedPart::kNever, true, Renormalize::kNone},
    {"qwen2_moe", "Qwen2MoeForCausalLM", "mlp", "gate_proj", "up_proj", "down_proj", "num_experts",
     "moe_intermediate_size", SharedPart::kAlways, true, Renormalize::kNone},
    {"qwen3_moe", "Qwen3MoeForCausalLM", "mlp", "gate_proj", "up_proj", "down_proj", "num_experts",
     "moe_intermediate_size", SharedPart::kNever, true, Renormalize::kSum},
};

const Family& find_family(const std::string& model_type) {
  for (const Family& family : kFamilies) {
    if (model_type == family.model_type) return family;
  }
  throw Error(ErrorCode::kUnknownName,
              {.what = "synth does not write this model type",
               .tensor = "--model-type",
               .expected = fmt::format("one of {}", fmt::join(synth_model_types(), ", ")),
               .found = fmt::format("'{}'", model_type)});
}

std::string_view config_dtype(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    default:
      return "float32";
  }
}

// The form of the model's weights, which says how files hold them.
WeightForm form_of(const MoeSpec& spec) {
  const QuantSpec& quant = spec.quant;
  for (const WeightForm& form : weight_forms()) {
    if (quant.weights != WeightScale::kNone && form.method.empty()) continue;
    // A configuration states these two beside the form, and make_config takes them from the spec.
    QuantSpec known = form.quant;
    known.activation_group = quant.activation_group;
    known.power_of_two_scales = quant.power_of_two_scales;
    if (form.dtype == spec.weight_dtype && known == quant) return form;
  }
  throw Error(ErrorCode::kUnsupported, {.what = "no checkpoints have weights of this form",
                                        .found = std::string(to_string(spec.weight_dtype))});
}

class TensorList {
 public:
  TensorList(const SynthModel& model, const Family& family)
      : model_(model),
        family_(family),
        source_(make_synthetic_source(model.spec, 0)),
        form_(form_of(model.spec)) {
    if (form_.quant.weights != WeightScale::kNone) writer_.emplace(method_form(form_));
  }

  std::vector<SynthTensor> build() {
    const MoeSpec& spec = model_.spec;
    for (layer_ = 0; layer_ < model_.num_layers; ++layer_) {
      add("gate", weights::kRouter, 0);
      for (int64_t expert = 0; expert < spec.num_experts; ++expert) {
        const std::string prefix = fmt::format("experts.{}.", expert);
        add(prefix + family_.gate, weights::kGate, expert);
        add(prefix + family_.up, weights::kUp, expert);
        add(prefix + family_.down, weights::kDown, expert);
      }
      if (spec.shared.mode != SharedMode::kNone) add_shared();
    }
    return std::move(tensors_);
  }

 private:
  void add_shared() {
    const std::string prefix = "shared_expert.";
    add(prefix + "gate_proj", weights::kSharedGate, 0);
    add(prefix + "up_proj", weights::kSharedUp, 0);
    add(prefix + "down_proj", weights::kSharedDown, 0);
    add("shared_expert_gate", weights::kSharedExpertGate, 0);
  }

  // Adds nothing if the layer has no such weights.
  void add(const std::string& module, WeightId matrix, int64_t expert) {
    const std::string name = fmt::format("model.layers.{}.{}.{}.", layer_, family_.block, module);
    const WeightInfo info = source_->describe(matrix);
    if (info.count == 0) return;
    for (WrittenTensor& tensor : tensors_of(name + "weight", matrix, info)) {
      const WeightId id = matrix.mlp() ? matrix.with(tensor.plane) : matrix;
      const WeightInfo plane = source_->describe(id);
      const bool is_codes = tensor.plane == WeightPlane::kWeights;
      tensors_.push_back({.name = std::move(tensor.name),
                          .layer = layer_,
                          .id = id,
                          .expert = expert,
                          .rows = plane.rows,
                          .cols = plane.cols,
                          .dtype = tensor.dtype,
                          .shape = std::move(tensor.shape),
                          .bytes = tensor.bytes,
                          .is_shape = !tensor.is_plane && is_codes,
                          .is_divisor = !tensor.is_plane && !is_codes});
    }
  }

  // Those of a matrix by its method, or of values.
  std::vector<WrittenTensor> tensors_of(const std::string& name, WeightId matrix,
                                        const WeightInfo& info) const {
    if (writer_ && matrix.mlp()) return writer_->tensors(name, info.rows, info.cols);
    const auto bytes = static_cast<uint64_t>(info.rows * info.cols * byte_size(info.dtype));
    return {{.name = name,
             .dtype = info.dtype,
             .shape = {info.rows, info.cols},
             .bytes = bytes,
             .is_plane = true}};
  }

  const SynthModel& model_;
  const Family& family_;
  std::unique_ptr<WeightSource> source_;
  WeightForm form_;
  std::optional<MethodWriter> writer_;
  int64_t layer_ = 0;
  std::vector<SynthTensor> tensors_;
};

// The linear layers whose weights are values.
std::vector<std::string> gates_of(const SynthModel& model, const Family& family) {
  std::vector<std::string> names;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const std::string block = fmt::format("model.layers.{}.{}.", layer, family.block);
    names.push_back(block + "gate");
    if (model.spec.shared.mode != SharedMode::kNone) names.push_back(block + "shared_expert_gate");
  }
  return names;
}

}  // namespace

std::vector<std::string> synth_model_types() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) names.emplace_back(family.model_type);
  return names;
}

Renormalize usual_renormalize(const std::string& model_type) {
  return find_family(model_type).usual;
}

void check_family(const SynthModel& model) {
  const Family& family = find_family(model.model_type);
  const bool has_shared = model.spec.shared.mode != SharedMode::kNone;
  if (has_shared == (family.shared == SharedPart::kAlways)) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = has_shared ? "models of this type have no shared expert"
                                  : "models of this type have a shared expert",
               .tensor = "--shared",
               .found = model.model_type,
               .hint = has_shared ? "leave out --shared, or choose --model-type qwen2_moe"
                                  : "give its intermediate size with --shared"});
}

std::vector<SynthShard> plan_shards(const SynthModel& model, uint64_t shard_bytes) {
  std::vector<SynthShard> shards;
  for (SynthTensor& tensor : TensorList(model, find_family(model.model_type)).build()) {
    const bool full = shards.empty() || (shards.back().bytes + tensor.bytes > shard_bytes &&
                                         !shards.back().tensors.empty());
    if (full) shards.emplace_back();
    shards.back().bytes += tensor.bytes;
    shards.back().tensors.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].file_name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  }
  return shards;
}

nlohmann::ordered_json make_config(const SynthModel& model) {
  const Family& family = find_family(model.model_type);
  const MoeSpec& spec = model.spec;
  nlohmann::ordered_json config = {{"architectures", {family.class_name}},
                                   {"model_type", family.model_type},
                                   {"dtype", config_dtype(natural_row_dtype(spec))},
                                   {"hidden_act", spec.activation.name},
                                   {"hidden_size", spec.hidden_size},
                                   {family.intermediate_key, spec.intermediate_size},
                                   {family.experts_key, spec.num_experts},
                                   {"num_experts_per_tok", spec.top_k},
                                   {"num_hidden_layers", model.num_layers}};
  if (family.has_norm_topk_prob) {
    config["norm_topk_prob"] = spec.router.renormalize == Renormalize::kSum;
  }
  // Families with a separate dense size have it unused, since every layer is an MoE layer.
  if (family.intermediate_key != std::string_view("intermediate_size")) {
    config["intermediate_size"] = 4 * spec.intermediate_size;
    config["decoder_sparse_step"] = 1;
    config["mlp_only_layers"] = nlohmann::ordered_json::array();
  }
  if (spec.shared.mode != SharedMode::kNone) {
    config["shared_expert_intermediate_size"] = spec.shared.intermediate_size;
  }
  if (spec.quant.weights != WeightScale::kNone) {
    MethodForm form = method_form(form_of(spec));
    form.quant = spec.quant;
    const std::string text = MethodWriter(form).configuration(gates_of(model, family));
    config["quantization_config"] = nlohmann::ordered_json::parse(text);
  }
  return config;
}

nlohmann::ordered_json make_index(const std::vector<SynthShard>& shards) {
  uint64_t bytes = 0;
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  for (const SynthShard& shard : shards) {
    bytes += shard.bytes;
    for (const SynthTensor& tensor : shard.tensors) map[tensor.name] = shard.file_name;
  }
  return {{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(map)}};
}

}  // namespace conclave::tool
