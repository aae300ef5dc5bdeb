#include "fields.h"

#include "arrays.h"
#include "names.h"
#include "tuning.h"

#include "conclave/error.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

// Every struct lists its fields once, in the order of its header, for reading and for writing.
template <class Visitor>
void visit(SimulatedRouting& value, Visitor& fields) {
  fields("distribution", value.distribution);
  fields("seed", value.seed);
  fields("zipf_exponent", value.zipf_exponent);
  fields("replay_ids", value.replay_ids);
  fields("replay_weights", value.replay_weights);
}

template <class Visitor>
void visit(RouterInputNorm& value, Visitor& fields) {
  fields("enabled", value.enabled);
  fields("epsilon", value.epsilon);
}

template <class Visitor>
void visit(RouterSpec& value, Visitor& fields) {
  fields("name", value.name);
  fields("score", value.score);
  fields("order", value.order);
  fields("has_logit_bias", value.has_logit_bias);
  fields("soft_cap", value.soft_cap);
  fields("has_selection_bias", value.has_selection_bias);
  fields("num_groups", value.num_groups);
  fields("topk_groups", value.topk_groups);
  fields("group_score", value.group_score);
  fields("group_mask", value.group_mask);
  fields("renormalize", value.renormalize);
  fields("renormalize_p", value.renormalize_p);
  fields("epsilon", value.epsilon);
  fields("epsilon_mode", value.epsilon_mode);
  fields("scale", value.scale);
  fields("has_expert_scale", value.has_expert_scale);
  fields("has_global_scale", value.has_global_scale);
  fields("jitter_epsilon", value.jitter_epsilon);
  fields("vocab_size", value.vocab_size);
  fields("simulated", value.simulated);
  fields("input_norm", value.input_norm);
  fields("logits_dtype", value.logits_dtype);
  fields("score_dtype", value.score_dtype);
  fields("options", value.options);
}

template <class Visitor>
void visit(ActivationSpec& value, Visitor& fields) {
  fields("name", value.name);
  fields("limit", value.limit);
  fields("alpha", value.alpha);
  fields("beta", value.beta);
  fields("linear_beta", value.linear_beta);
}

template <class Visitor>
void visit(SharedExpertSpec& value, Visitor& fields) {
  fields("mode", value.mode);
  fields("intermediate_size", value.intermediate_size);
  fields("count", value.count);
  fields("activation", value.activation);
  fields("has_bias", value.has_bias);
  fields("slot_weight", value.slot_weight);
  fields("weight_dtype", value.weight_dtype);
}

template <class Visitor>
void visit(LatentSpec& value, Visitor& fields) {
  fields("size", value.size);
  fields("has_norm", value.has_norm);
  fields("norm_epsilon", value.norm_epsilon);
}

template <class Visitor>
void visit(ResidualMlpSpec& value, Visitor& fields) {
  fields("intermediate_size", value.intermediate_size);
  fields("activation", value.activation);
  fields("weight_dtype", value.weight_dtype);
}

template <class Visitor>
void visit(MatrixCodes& value, Visitor& fields) {
  fields("dtype", value.dtype);
  fields("block_cols", value.block_cols);
  fields("has_zeros", value.has_zeros);
  fields("scale_values", value.scale_values);
  fields("zero_values", value.zero_values);
}

template <class Visitor>
void visit(QuantSpec& value, Visitor& fields) {
  fields("weights", value.weights);
  fields("block_rows", value.block_rows);
  fields("block_cols", value.block_cols);
  fields("activations", value.activations);
  fields("activation_group", value.activation_group);
  fields("activation_dtype", value.activation_dtype);
  fields("activation_scale_rule", value.activation_scale_rule);
  fields("power_of_two_scales", value.power_of_two_scales);
  fields("signed_scales", value.signed_scales);
  fields("scale_values", value.scale_values);
  fields("zeros", value.zeros);
  fields("zero_values", value.zero_values);
  fields("has_global_scale", value.has_global_scale);
  fields("has_column_order", value.has_column_order);
  fields("has_column_factors", value.has_column_factors);
  fields("gate_up_codes", value.gate_up_codes);
  fields("down_codes", value.down_codes);
}

template <class Visitor>
void visit(WeightForm& value, Visitor& fields) {
  fields("name", value.name);
  fields("dtype", value.dtype);
  fields("quant", value.quant);
  fields("method", value.method);
  fields("format", value.format);
  fields("type", value.type);
  fields("packed_in", value.packed_in);
  fields("scale_dtype", value.scale_dtype);
}

template <class Visitor>
void visit(MoeSpec& value, Visitor& fields) {
  fields("num_experts", value.num_experts);
  fields("top_k", value.top_k);
  fields("hidden_size", value.hidden_size);
  fields("intermediate_size", value.intermediate_size);
  fields("weight_dtype", value.weight_dtype);
  fields("quant", value.quant);
  fields("router", value.router);
  fields("activation", value.activation);
  fields("shared", value.shared);
  fields("has_gate", value.has_gate);
  fields("has_bias", value.has_bias);
  fields("has_output_bias", value.has_output_bias);
  fields("num_zero_experts", value.num_zero_experts);
  fields("weight_on", value.weight_on);
  fields("output_scale", value.output_scale);
  fields("latent", value.latent);
  fields("residual", value.residual);
}

template <class Visitor>
void visit(LayerOptions& value, Visitor& fields) {
  fields("max_tokens", value.max_tokens);
  fields("id_policy", value.id_policy);
  fields("kernel", value.kernel);
  fields("arithmetic", value.arithmetic);
  fields("transport", value.transport);
  fields("ep_combine", value.ep_combine);
  fields("chunk_order", value.chunk_order);
  fields("micro_batch_tokens", value.micro_batch_tokens);
  fields("determinism", value.determinism);
  fields("spare_experts", value.spare_experts);
  fields("max_adapter_rank", value.max_adapter_rank);
  fields("tuning", value.tuning);
}

template <class Visitor>
void visit(ParallelSpec& value, Visitor& fields) {
  fields("ep_size", value.ep_size);
  fields("ep_rank", value.ep_rank);
  fields("placement", value.placement);
  fields("rank_of", value.rank_of);
  fields("num_redundant_experts", value.num_redundant_experts);
  fields("replica_of", value.replica_of);
  fields("tp_size", value.tp_size);
  fields("tp_rank", value.tp_rank);
  fields("reduce", value.reduce);
}

// One level, as a line of a table has it.
template <class Visitor>
void visit(TuningEntry& value, Visitor& fields) {
  fields("device", value.key.device);
  fields("format", value.key.format);
  fields("num_experts", value.key.num_experts);
  fields("hidden_size", value.key.hidden_size);
  fields("intermediate_size", value.key.intermediate_size);
  fields("top_k", value.key.top_k);
  fields("tokens", value.tokens);
  fields("kernel", value.kernel);
  fields("tile", value.tile);
  fields("microseconds", value.microseconds);
}

using Tuning = std::shared_ptr<const TuningTable>;
using Options = std::map<std::string, double>;

template <class T>
constexpr bool is_struct =
    std::is_class_v<T> && !std::is_same_v<T, std::string> && !std::is_same_v<T, std::string_view> &&
    !std::is_same_v<T, std::vector<int32_t>> && !std::is_same_v<T, std::vector<float>> &&
    !std::is_same_v<T, std::optional<DType>> && !std::is_same_v<T, Tuning> &&
    !std::is_same_v<T, Options>;

class Reader {
 public:
  Reader(nb::dict dict, std::string path) : dict_(std::move(dict)), path_(std::move(path)) {}

  template <class T>
  void operator()(const char* name, T& field) {
    known_ += (known_.empty() ? "" : ", ") + std::string(name);
    if (!dict_.contains(name)) return;
    ++taken_;
    read(path_ + name, nb::object(dict_[name]), field);
  }

  void finish() const {
    if (taken_ == nb::len(dict_)) return;
    for (const auto& [key, value] : dict_) {
      const auto text = nb::cast<std::string>(nb::str(key));
      if ((", " + known_ + ",").find(" " + text + ",") != std::string::npos) continue;
      throw Error(ErrorCode::kInvalidArgument, {.what = "there is no such field",
                                                .tensor = path_ + text,
                                                .expected = "one of " + known_});
    }
  }

 private:
  template <class T>
  static void read(const std::string& field, const nb::object& object, T& value) {
    if constexpr (std::is_same_v<T, DType>) {
      value = dtype_from_python(object, field.c_str());
    } else if constexpr (std::is_same_v<T, std::optional<DType>>) {
      if (!object.is_none()) value = dtype_from_python(object, field.c_str());
    } else if constexpr (std::is_same_v<T, Tuning>) {
      value = tuning_from_python(field, object);
    } else if constexpr (std::is_enum_v<T>) {
      value = parse_word<T>(field, cast<std::string>(field, object));
    } else if constexpr (is_struct<T>) {
      // A name alone stands for an activation without parameters.
      if constexpr (std::is_same_v<T, ActivationSpec>) {
        if (nb::isinstance<nb::str>(object)) return read(field, object, value.name);
      }
      Reader nested(cast<nb::dict>(field, object), field + ".");
      visit(value, nested);
      nested.finish();
    } else {
      value = cast<T>(field, object);
    }
  }

  template <class T>
  static T cast(const std::string& field, const nb::object& object) {
    try {
      return nb::cast<T>(object);
    } catch (const std::bad_cast&) {
      throw Error(ErrorCode::kDType, {.what = "a field has the wrong type",
                                      .tensor = field,
                                      .expected = type_word<T>(),
                                      .found = nb::cast<std::string>(nb::repr(object))});
    }
  }

  template <class T>
  static std::string type_word() {
    if constexpr (std::is_same_v<T, bool>) return "True or False";
    if constexpr (std::is_integral_v<T>) return "an integer";
    if constexpr (std::is_floating_point_v<T>) return "a number";
    if constexpr (std::is_same_v<T, std::string>) return "a string";
    if constexpr (std::is_same_v<T, nb::dict>) return "a dictionary";
    if constexpr (std::is_same_v<T, Options>) return "a dictionary of numbers";
    return "a list of numbers";
  }

  nb::dict dict_;
  std::string path_;
  std::string known_;
  size_t taken_ = 0;
};

class Writer {
 public:
  template <class T>
  void operator()(const char* name, T& field) {
    if constexpr (std::is_same_v<T, DType>) {
      dict_[name] = dtype_to_python(field);
    } else if constexpr (std::is_same_v<T, std::optional<DType>>) {
      dict_[name] = field ? nb::cast(dtype_to_python(*field)) : nb::none();
    } else if constexpr (std::is_same_v<T, Tuning>) {
      if (field != nullptr) dict_[name] = *field;
    } else if constexpr (std::is_enum_v<T>) {
      dict_[name] = word_of(field);
    } else if constexpr (is_struct<T>) {
      Writer nested;
      visit(field, nested);
      dict_[name] = nested.dict();
    } else {
      dict_[name] = field;
    }
  }
  nb::dict dict() const { return dict_; }

 private:
  nb::dict dict_;
};

template <class Struct>
Struct read_struct(const nb::dict& dict) {
  Struct value;
  Reader reader(dict, "");
  visit(value, reader);
  reader.finish();
  return value;
}

template <class Struct>
nb::dict write_struct(Struct value) {
  Writer writer;
  visit(value, writer);
  return writer.dict();
}

}  // namespace

MoeSpec spec_from_dict(const nb::dict& dict) { return read_struct<MoeSpec>(dict); }
LayerOptions options_from_dict(const nb::dict& dict) { return read_struct<LayerOptions>(dict); }
ParallelSpec parallel_from_dict(const nb::dict& dict) { return read_struct<ParallelSpec>(dict); }
TuningEntry tuning_entry_from_dict(const nb::dict& dict) { return read_struct<TuningEntry>(dict); }

nb::dict spec_to_dict(const MoeSpec& spec) { return write_struct(spec); }
nb::dict options_to_dict(const LayerOptions& options) { return write_struct(options); }
nb::dict parallel_to_dict(const ParallelSpec& parallel) { return write_struct(parallel); }
nb::dict tuning_entry_to_dict(const TuningEntry& entry) { return write_struct(entry); }

nb::dict weight_form_to_dict(const WeightForm& form) { return write_struct(form); }

nb::dict plan_to_dict(const Plan& plan) {
  nb::list rows;
  for (const PlanRow& row : plan.rows) {
    nb::dict entry;
    entry["table"] = row.table;
    entry["name"] = row.name;
    entry["chosen"] = row.chosen;
    entry["reason"] = row.reason;
    rows.append(entry);
  }
  nb::list ladder;
  for (const PlanRung& rung : plan.ladder) {
    nb::dict entry;
    entry["first_tokens"] = rung.first_tokens;
    entry["last_tokens"] = rung.last_tokens;
    entry["kernel"] = rung.kernel;
    entry["tile"] = rung.tile;
    entry["reason"] = rung.reason;
    entry["workspace_bytes"] = rung.workspace_bytes;
    ladder.append(entry);
  }
  nb::list buffers;
  for (const PlanBuffer& buffer : plan.buffers) {
    nb::dict entry;
    entry["name"] = buffer.name;
    entry["bytes"] = buffer.bytes;
    entry["first_stage"] = buffer.first_stage;
    entry["last_stage"] = buffer.last_stage;
    buffers.append(entry);
  }
  nb::dict dict;
  dict["rows"] = rows;
  dict["device"] = plan.device;
  dict["ladder"] = ladder;
  dict["isa"] = plan.isa;
  dict["arithmetic"] = plan.arithmetic;
  dict["determinism"] = plan.determinism;
  dict["tile"] = plan.tile;
  dict["router"] = plan.router;
  dict["dispatcher"] = plan.dispatcher;
  dict["stages"] = plan.stages;
  dict["buffers"] = buffers;
  dict["part"] = plan.part;
  dict["max_tokens"] = plan.max_tokens;
  dict["num_local_experts"] = plan.num_local_experts;
  dict["workspace_bytes"] = plan.workspace_bytes;
  dict["packed_bytes"] = plan.packed_bytes;
  dict["packed_layout"] = plan.packed_layout;
  return dict;
}

}  // namespace conclave::python
