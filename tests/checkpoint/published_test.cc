// Reads every family as transformers' own configuration classes do: testdata/published.json has
// configurations without their optional keys and with none at its default, and the layers they
// describe. Values that the table does not name have the library's defaults.
#include "checkpoint/model_config.h"
#include "io/json.h"

#include "conclave/checkpoint.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace conclave::checkpoint {
namespace {

using nlohmann::json;
using Fields = std::map<std::string, json>;

const json& published() {
  static const json table = json::parse(std::ifstream("testdata/published.json"));
  return table;
}

template <class Choice>
std::string name_of(Choice value, std::initializer_list<const char*> names) {
  return names.begin()[static_cast<size_t>(value)];
}

void add_activation(const std::string& prefix, const ActivationSpec& activation, Fields& fields) {
  fields[prefix + "name"] = activation.name;
  fields[prefix + "limit"] = activation.limit;
  fields[prefix + "alpha"] = activation.alpha;
  fields[prefix + "beta"] = activation.beta;
  fields[prefix + "linear_beta"] = activation.linear_beta;
}

// The router's types are added separately: they depend on those of the model and of the file.
void add_router(const RouterSpec& r, Fields& fields) {
  fields["router.name"] = r.name;
  fields["router.score"] = name_of(r.score, {"softmax", "sigmoid", "sqrtsoftplus", "none"});
  fields["router.order"] = name_of(r.order, {"score_then_topk", "topk_then_score"});
  fields["router.has_logit_bias"] = r.has_logit_bias;
  fields["router.soft_cap"] = r.soft_cap;
  fields["router.has_selection_bias"] = r.has_selection_bias;
  fields["router.num_groups"] = r.num_groups;
  fields["router.topk_groups"] = r.topk_groups;
  fields["router.group_score"] = name_of(r.group_score, {"max", "top2_sum"});
  fields["router.group_mask"] = name_of(r.group_mask, {"inf", "zero"});
  fields["router.renormalize"] = name_of(r.renormalize, {"none", "sum", "p_norm", "softmax"});
  fields["router.renormalize_p"] = r.renormalize_p;
  fields["router.epsilon"] = r.epsilon;
  fields["router.epsilon_mode"] = name_of(r.epsilon_mode, {"add", "clamp_min"});
  fields["router.scale"] = r.scale;
  fields["router.has_expert_scale"] = r.has_expert_scale;
  fields["router.has_global_scale"] = r.has_global_scale;
  fields["router.jitter_epsilon"] = r.jitter_epsilon;
  fields["router.vocab_size"] = r.vocab_size;
  fields["router.input_norm.enabled"] = r.input_norm.enabled;
  fields["router.input_norm.epsilon"] = r.input_norm.epsilon;
}

Fields fields_of(const MoeSpec& spec) {
  Fields fields = {
      {"num_experts", spec.num_experts},
      {"top_k", spec.top_k},
      {"hidden_size", spec.hidden_size},
      {"intermediate_size", spec.intermediate_size},
      {"has_gate", spec.has_gate},
      {"has_bias", spec.has_bias},
      {"has_output_bias", spec.has_output_bias},
      {"num_zero_experts", spec.num_zero_experts},
      {"weight_on", name_of(spec.weight_on, {"output", "input"})},
      {"output_scale", spec.output_scale},
      {"latent.size", spec.latent.size},
      {"latent.has_norm", spec.latent.has_norm},
      {"latent.norm_epsilon", spec.latent.norm_epsilon},
      {"residual.intermediate_size", spec.residual.intermediate_size},
      {"shared.mode", name_of(spec.shared.mode, {"none", "add", "sigmoid_gate", "average",
                                                 "softmax_mix", "router_weight", "fused_slots"})},
      {"shared.intermediate_size", spec.shared.intermediate_size},
      {"shared.count", spec.shared.count},
      {"shared.has_bias", spec.shared.has_bias},
      {"shared.slot_weight", spec.shared.slot_weight}};
  add_router(spec.router, fields);
  add_activation("activation.", spec.activation, fields);
  add_activation("shared.activation.", spec.shared.activation, fields);
  add_activation("residual.activation.", spec.residual.activation, fields);
  return fields;
}

// "model" follows the type of the model, "stored" that of the router's matrix, "f32" neither.
std::string precision(DType type) {
  if (type == DType::kBF16) return "model";
  return type == DType::kF16 ? "stored" : "f32";
}

Fields read_layer(const ModelConfig& model, const LayerConfig& layer) {
  Fields fields = fields_of(layer.spec);
  RouterSpec router = layer.spec.router;
  set_stored_rounding(model, DType::kF16, router);
  fields["router.logits_dtype"] = precision(router.logits_dtype);
  fields["router.score_dtype"] = precision(router.score_dtype);
  return fields;
}

Fields expected_fields(const json& changes) {
  static const MoeSpec kDefaults;
  Fields fields = fields_of(kDefaults);
  fields["router.logits_dtype"] = "f32";
  fields["router.score_dtype"] = "f32";
  for (const auto& [name, value] : changes.items()) {
    EXPECT_TRUE(fields.contains(name)) << name << " is no field of a layer";
    fields[name] = value;
  }
  return fields;
}

void expect_layer(const ModelConfig& model, const LayerConfig& layer, const json& changes) {
  const Fields expected = expected_fields(changes);
  const Fields actual = read_layer(model, layer);
  for (const auto& [name, value] : expected) {
    EXPECT_EQ(actual.at(name), value) << "layer " << layer.index << ", " << name;
  }
}

void expect_model(const json& config, const json& published_case,
                  ExpertSet experts = ExpertSet::kText) try {
  const io::JsonDocument document = io::JsonDocument::parse(config.dump(), "config.json");
  const ModelConfig model = read_model_config(document.root(), experts);
  EXPECT_TRUE(model.support) << model.support.reason();
  std::vector<int64_t> layers;
  for (const LayerConfig& layer : model.layers) layers.push_back(layer.index);
  EXPECT_EQ(json(layers), published_case.at("layers"));
  for (const LayerConfig& layer : model.layers) {
    json changes = published_case.at("spec");
    if (published_case.contains("layer_specs")) {
      changes.update(
          published_case["layer_specs"].value(std::to_string(layer.index), json::object()));
    }
    expect_layer(model, layer, changes);
  }
} catch (const Error& error) {
  ADD_FAILURE() << error.what();
}

json with_type(json config, const std::string& type) {
  config["model_type"] = type;
  config["dtype"] = "bfloat16";
  return config;
}

TEST(PublishedConfigs, EveryFamily_IsReadAsPublished) {
  for (const json& family : published().at("families")) {
    for (const json& c : family.at("cases")) {
      for (const std::string type : family.at("types")) {
        SCOPED_TRACE(type + ", " + c.at("name").get<std::string>() + " (" +
                     family.at("by").get<std::string>() + ", " +
                     family.at("source").get<std::string>() + ")");
        expect_model(with_type(c.at("config"), type), c);
      }
      for (const std::string outer : family.at("wrapped")) {
        SCOPED_TRACE(outer + " around the text, " + c.at("name").get<std::string>());
        const json text = with_type(c.at("config"), family.at("types").front());
        expect_model({{"model_type", outer}, {"text_config", text}}, c);
      }
    }
  }
}

// The second set of experts, besides those for text.
TEST(PublishedConfigs, ExpertsForImages_DifferWhereTheyArePublishedTo) {
  int families = 0;
  for (const json& family : published().at("families")) {
    if (!family.contains("vision")) continue;
    ++families;
    for (json c : family.at("cases")) {
      SCOPED_TRACE(family.at("types").front().get<std::string>());
      c["spec"].update(family["vision"]);
      expect_model(with_type(c.at("config"), family.at("types").front()), c, ExpertSet::kVision);
    }
  }
  EXPECT_EQ(families, 1);
}

TEST(PublishedConfigs, EveryTypeThatIsRead_HasARow) {
  std::set<std::string> missing;
  for (const std::string& type : known_model_types()) missing.insert(type);
  for (const json& family : published().at("families")) {
    for (const std::string type : family.at("types")) missing.erase(type);
    for (const std::string type : family.at("wrapped")) missing.erase(type);
  }
  for (const std::string& type : missing) ADD_FAILURE() << type << " has no row";
}

}  // namespace
}  // namespace conclave::checkpoint
