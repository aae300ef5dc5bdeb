// What configurations of quantisation methods mean, and that what is not read has a reason.

#include "checkpoint/methods/config.h"
#include "checkpoint/methods/module_rules.h"
#include "checkpoint/quantization.h"
#include "tiny_model.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>

namespace conclave::testing {
namespace {

using checkpoint::kPlainRows;
using checkpoint::Quantization;
using checkpoint::QuantizedWeights;
using nlohmann::json;

Quantization read(const json& config) {
  const io::JsonDocument document =
      io::JsonDocument::parse(config.dump(), "config.json", io::kConfigLimits);
  return checkpoint::read_quantization(document.root());
}

json with(json config, const json& changes) {
  config.update(changes);
  return config;
}

void expect_reason_of(const Quantization& found, const std::string& words) {
  EXPECT_FALSE(found.weights);
  EXPECT_NE(found.reason.find(words), std::string::npos) << found.reason;
}
void expect_reason(const json& config, const std::string& words) {
  SCOPED_TRACE(config.dump());
  expect_reason_of(read(config), words);
}
void expect_error(const json& config, ErrorCode code) {
  const auto error = error_of([&] { static_cast<void>(read(config)); });
  ASSERT_TRUE(error) << config.dump();
  EXPECT_EQ(error->code(), code) << error->what();
}

json gptq() { return {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}, {"sym", true}}; }

TEST(GptqConfig, WhatIsRead) {
  for (const int64_t bits : {2, 3, 4, 8}) {
    const auto found = read(with(gptq(), {{"bits", bits}}));
    ASSERT_TRUE(found.weights) << found.reason;
    EXPECT_EQ(found.weights->element, bits == 8 ? DType::kI8 : DType::kI4);
    EXPECT_EQ(found.weights->stored.bits, bits);
    EXPECT_TRUE(found.weights->stored.zeros_less_one);
    EXPECT_EQ(found.weights->spec.weights, WeightScale::kBlock);
    EXPECT_EQ(found.weights->spec.block_cols, 128);
    EXPECT_EQ(found.weights->spec.zeros, WeightZero::kNone);
    EXPECT_FALSE(found.weights->spec.has_column_order);
  }
  const auto spec = [](const json& changes) { return read(with(gptq(), changes)).weights->spec; };
  EXPECT_EQ(spec({{"sym", false}}).zeros, WeightZero::kPoint);
  EXPECT_EQ(spec({{"group_size", -1}}).weights, WeightScale::kChannel);
  EXPECT_TRUE(spec({{"desc_act", true}}).has_column_order);
  EXPECT_FALSE(spec({{"desc_act", true}, {"static_groups", true}}).has_column_order);
  EXPECT_FALSE(spec({{"desc_act", true}, {"group_size", -1}}).has_column_order);
  EXPECT_FALSE(
      read(with(gptq(), {{"checkpoint_format", "gptq_v2"}})).weights->stored.zeros_less_one);
}

// The scheme of a module where modules have their own.
checkpoint::QuantizedWeights scheme_in(const checkpoint::Quantization& found,
                                       const std::string& module) {
  return checkpoint::scheme_of(*found.weights->by_module, module)->weights.value();
}

TEST(GptqConfig, RulesForSomeModules) {
  const auto rule = [](const std::string& key, const json& changes) {
    return with(gptq(), {{"dynamic", {{key, changes}}}});
  };
  EXPECT_TRUE(read(rule("-:.*mlp\\.experts.*", json::object())).weights);
  EXPECT_TRUE(read(rule("+:.*self_attn.*", {{"bits", 8}})).weights);
  EXPECT_TRUE(read(rule(".*\\.(q|k|v|o)_proj", {{"bits", 8}})).weights);
  EXPECT_TRUE(read(rule("+:.*down_proj.*", {{"damp_percent", 0.1}})).weights);
  const std::string down = "model.layers.20.mlp.experts.7.down_proj";
  for (const char* key :
       {"+:.*down_proj.*", ".*\\.experts\\.\\d+\\.down", "model.layers.2[0-9].*"}) {
    const auto wider = read(rule(key, {{"bits", 8}}));
    ASSERT_TRUE(wider.weights) << wider.reason;
    EXPECT_EQ(scheme_in(wider, down).element, DType::kI8);
    EXPECT_EQ(scheme_in(wider, "model.layers.1.mlp.experts.0.up_proj").element, DType::kI4);
    EXPECT_EQ(scheme_in(read(rule(key, {{"group_size", 64}})), down).spec.block_cols, 64);
    expect_reason(rule(key, {{"bits", 5}}), "5 bits");
  }
}

TEST(GptqConfig, RulesAboutTheLayout_AreKeptOrRefusedByName) {
  const auto rule = [](const json& changes) {
    return with(gptq(), {{"dynamic", {{"+:.*down_proj.*", changes}}}});
  };
  for (const json& same :
       {json{{"pack_dtype", "int32"}}, json{{"format", "gptq"}},
        json{{"checkpoint_format", "gptq"}}, json{{"hessian", {{"a", 1}}}}, json{{"foem", nullptr}},
        json{{"smoother", "mad"}}, json{{"v2", true}}}) {
    EXPECT_TRUE(read(rule(same)).weights) << same.dump();
  }
  expect_reason(rule({{"pack_dtype", "int16"}}), "int16");
  expect_reason(rule({{"format", "gptq_v2"}}), "gptq_v2");
  expect_reason(rule({{"checkpoint_format", "marlin"}}), "marlin");
  expect_reason(with(gptq(), {{"checkpoint_format", nullptr}, {"format", "gptq_p"}}), "gptq_p");
}

TEST(GptqConfig, RulesThatCannotBe_NameTheirKey) {
  const auto named = [](const json& dynamic, const std::string& key) {
    const auto error = error_of([&] { read(with(gptq(), {{"dynamic", dynamic}})); });
    ASSERT_TRUE(error) << dynamic.dump();
    EXPECT_EQ(error->code(), ErrorCode::kConfigValue) << error->what();
    EXPECT_TRUE(error->detail().tensor.ends_with(key)) << error->what();
  };
  named({{"down", {{"group_size", 0}}}}, "down.group_size");
  named({{"down", {{"bitz", 8}}}}, "down.bitz");
  named({{"down", 3}}, "down");
  named(3, "dynamic");
  named(json::array(), "dynamic");
  EXPECT_TRUE(read(with(gptq(), {{"dynamic", {{"-:down", {}}}}})).weights);
  EXPECT_TRUE(read(with(gptq(), {{"dynamic", nullptr}})).weights);
}

TEST(GptqConfig, WhatIsNotRead_HasAReason) {
  expect_reason(with(gptq(), {{"bits", 5}}), "5 bits");
  for (const char* layout : {"gptq_p", "marlin", "bitblas"}) {
    expect_reason(with(gptq(), {{"checkpoint_format", layout}}), layout);
  }
  expect_reason(with(gptq(), {{"is_marlin_format", true}}), "marlin");
  expect_reason(with(gptq(), {{"pack_dtype", "int16"}}), "int16");
  expect_reason(with(gptq(), {{"rotation", "hadamard"}}), "rotated");
  expect_error({{"quant_method", "gptq"}, {"bits", 4}}, ErrorCode::kConfigMissingKey);
  expect_error(with(gptq(), {{"group_size", 0}}), ErrorCode::kConfigValue);
  expect_error(with(gptq(), {{"group_size", int64_t{1} << 40}}), ErrorCode::kConfigValue);
  expect_error(with(gptq(), {{"bits", "4"}}), ErrorCode::kJsonType);
  expect_error(with(gptq(), {{"sym", 1}}), ErrorCode::kJsonType);
}

TEST(Fp8Config, ScalesOfRows) {
  const auto found = [](const char* format) {
    return read({{"quant_method", "fp8"}, {"scale_fmt", format}}).weights->spec;
  };
  EXPECT_TRUE(found("ue8m0").power_of_two_scales);
  EXPECT_FALSE(found("float").power_of_two_scales);
  expect_reason({{"quant_method", "fp8"}, {"scale_fmt", "e8m0"}}, "scales of e8m0");
}

TEST(AutoRoundConfig, IsWhatItPacksAs) {
  const json config = {{"quant_method", "auto-round"},
                       {"bits", 4},
                       {"group_size", 128},
                       {"sym", true},
                       {"packing_format", "auto_round:auto_gptq"}};
  EXPECT_EQ(read(config).weights->spec.zeros, WeightZero::kNone);
  EXPECT_TRUE(read(with(config, {{"packing_format", "auto_round:auto_awq"}})).weights);
  expect_reason(with(config, {{"packing_format", "auto_round:fp8"}}), "fp8");
  const std::string up = "model.layers.0.mlp.experts.0.up_proj";
  json extra = with(config, {{"extra_config", {{up, {{"bits", 8}}}}}});
  EXPECT_EQ(scheme_in(read(extra), up).element, DType::kI8);
  extra["packing_format"] = "auto_round:auto_awq";
  expect_reason(extra, "settings of their own");
}

TEST(AwqConfig, BothSpellings) {
  const json present = {
      {"quant_method", "awq"}, {"bits", 4}, {"group_size", 64}, {"zero_point", true}};
  const json older = {{"quant_method", "awq"},
                      {"w_bit", 4},
                      {"q_group_size", 64},
                      {"zero_point", true},
                      {"version", "GEMM"}};
  json unsaid = present;
  unsaid.erase("zero_point");
  for (const json& config : {present, older, unsaid, with(present, {{"version", "gemv"}})}) {
    const auto found = read(config);
    ASSERT_TRUE(found.weights) << found.reason;
    EXPECT_EQ(found.weights->element, DType::kI4);
    EXPECT_EQ(found.weights->spec.zeros, WeightZero::kPoint);
    EXPECT_EQ(found.weights->spec.block_cols, 64);
  }
  EXPECT_EQ(read(with(present, {{"zero_point", false}})).weights->spec.zeros, WeightZero::kNone);
  expect_reason(with(present, {{"version", "gemv_fast"}}), "gemv_fast");
  expect_reason(with(present, {{"bits", 8}}), "8 bits");
  expect_error({{"quant_method", "awq"}, {"bits", 4}}, ErrorCode::kConfigMissingKey);
}

TEST(Mxfp4Config, IsReadWithoutKeys) {
  const auto found = read({{"quant_method", "mxfp4"}, {"modules_to_not_convert", {"lm_head"}}});
  ASSERT_TRUE(found.weights) << found.reason;
  EXPECT_EQ(found.weights->element, DType::kF4);
  EXPECT_EQ(found.weights->spec.block_cols, 32);
}

TEST(BitsandbytesConfig, WhatIsRead) {
  const json four = {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}};
  EXPECT_EQ(read(four).weights->element, DType::kBnbFP4);
  const auto nf4 = read(with(four, {{"bnb_4bit_quant_type", "nf4"}}));
  EXPECT_EQ(nf4.weights->element, DType::kNF4);
  // Groups end where rows of every matrix do.
  MoeSpec layer;
  layer.hidden_size = 96;
  layer.intermediate_size = 40;
  QuantSpec spec = nf4.weights->spec;
  nf4.weights->fit(nf4.weights->stored, layer, spec);
  EXPECT_EQ(spec.block_cols, 8);
  layer.shared.mode = SharedMode::kAdd;
  layer.shared.intermediate_size = 36;
  nf4.weights->fit(nf4.weights->stored, layer, spec);
  EXPECT_EQ(spec.block_cols, 4);
  const auto int8 = read({{"quant_method", "bitsandbytes"}, {"load_in_8bit", true}});
  EXPECT_EQ(int8.weights->element, DType::kI8);
  EXPECT_EQ(int8.weights->spec.weights, WeightScale::kChannel);
  expect_reason({{"quant_method", "bitsandbytes"}}, "neither");
  expect_reason(with(four, {{"bnb_4bit_quant_type", "int4"}}), "int4");
}

// Rows are codes in groups of columns, of another type than usual if one is given.
void expect_rows(const QuantizedWeights& found, std::optional<DType> type, int64_t group,
                 RowScaleRule rule) {
  EXPECT_EQ(found.spec.activations, ActivationScale::kGroup);
  EXPECT_EQ(found.spec.activation_group, group);
  EXPECT_EQ(found.spec.activation_dtype, type);
  EXPECT_EQ(found.spec.activation_scale_rule, rule);
  EXPECT_EQ(found.note, "");
}

void expect_plain_rows(const QuantizedWeights& found) {
  EXPECT_EQ(found.spec.activations, ActivationScale::kNone);
  EXPECT_EQ(found.spec.activation_scale_rule, RowScaleRule::kQuotient);
  EXPECT_EQ(found.note, kPlainRows);
}

TEST(ModelOptConfig, SmallCodes) {
  const auto algorithm = [](const char* name) {
    return json{{"quant_method", "modelopt"}, {"quant_algo", name}};
  };
  const auto nvfp4 = read(algorithm("NVFP4"));
  ASSERT_TRUE(nvfp4.weights) << nvfp4.reason;
  EXPECT_EQ(nvfp4.weights->element, DType::kF4);
  EXPECT_TRUE(nvfp4.weights->spec.has_global_scale);
  EXPECT_EQ(nvfp4.weights->spec.block_cols, 16);
  expect_rows(*nvfp4.weights, DType::kF4, 16, RowScaleRule::kTwoLevel);
  const auto alone = read(algorithm("W4A16_NVFP4"));
  EXPECT_TRUE(alone.weights->note.empty());
  EXPECT_EQ(alone.weights->spec.activations, ActivationScale::kNone);
  for (const bool global : {false, true}) {
    const auto rows = read(algorithm(global ? "W4A8_NVFP4_FP8" : "W4A8_MXFP4_FP8"));
    ASSERT_TRUE(rows.weights) << rows.reason;
    EXPECT_EQ(rows.weights->note, "");
    EXPECT_EQ(rows.weights->element, DType::kF4);
    EXPECT_EQ(rows.weights->spec.has_global_scale, global);
    EXPECT_EQ(rows.weights->spec.activations, ActivationScale::kTensorStatic);
    EXPECT_EQ(rows.weights->spec.activation_dtype, std::nullopt) << "e4m3, as beside floats";
  }
  const auto mxfp8 = read(algorithm("MXFP8"));
  EXPECT_EQ(mxfp8.weights->element, DType::kF8E4M3);
  expect_rows(*mxfp8.weights, std::nullopt, 32, RowScaleRule::kQuotient);
  EXPECT_TRUE(mxfp8.weights->spec.power_of_two_scales);
  const auto awq = read(algorithm("W4A16_AWQ"));
  ASSERT_TRUE(awq.weights) << awq.reason;
  EXPECT_EQ(awq.weights->element, DType::kI4);
  EXPECT_EQ(awq.weights->spec.block_cols, 128);
  EXPECT_TRUE(awq.weights->spec.has_column_factors);
  json in_group = algorithm("W4A16_AWQ");
  in_group["config_groups"]["group_0"]["weights"]["group_size"] = 32;
  EXPECT_EQ(read(in_group).weights->spec.block_cols, 32);
  // Rows in e4m3 take codes of e4m3, which have all values of four bits.
  const auto with_rows = read(algorithm("W4A8_AWQ"));
  EXPECT_EQ(with_rows.weights->element, DType::kF8E4M3);
  EXPECT_EQ(with_rows.weights->spec.activations, ActivationScale::kTensorStatic);
  const auto fp4 = read(algorithm("NVFP4_AWQ"));
  EXPECT_EQ(fp4.weights->element, DType::kF4);
  EXPECT_TRUE(fp4.weights->spec.has_column_factors);
  expect_rows(*fp4.weights, DType::kF4, 16, RowScaleRule::kTwoLevel);
  const auto mixed = [](const char* second) {
    return json{{"quant_method", "modelopt"},
                {"quant_algo", "MIXED_PRECISION"},
                {"quantized_layers",
                 {{"model.layers.0.self_attn.q_proj", {{"quant_algo", "FP8"}}},
                  {"model.layers.0.mlp.experts.0.up_proj", {{"quant_algo", "NVFP4"}}},
                  {"model.layers.1.mlp.experts.0.up_proj", {{"quant_algo", second}}}}}};
  };
  EXPECT_EQ(read(mixed("NVFP4")).weights->element, DType::kF4);
  const auto both = read(mixed("FP8"));
  ASSERT_TRUE(both.weights) << both.reason;
  EXPECT_EQ(scheme_in(both, "model.layers.0.mlp.experts.0.up_proj").element, DType::kF4);
  EXPECT_EQ(scheme_in(both, "model.layers.1.mlp.experts.0.up_proj").element, DType::kF8E4M3);
  expect_reason(mixed("W4A8_LUT"), "W4A8_LUT");
  json groups = mixed("W4A16_AWQ");
  for (const int layer : {0, 1}) {
    const std::string module = "model.layers." + std::to_string(layer) + ".mlp.experts.0.up_proj";
    groups["quantized_layers"][module] = {{"quant_algo", "W4A16_AWQ"}, {"group_size", 32 << layer}};
  }
  const auto both_groups = read(groups);
  ASSERT_TRUE(both_groups.weights) << both_groups.reason;
  for (const int layer : {0, 1}) {
    const std::string module = "model.layers." + std::to_string(layer) + ".mlp.experts.0.up_proj";
    EXPECT_EQ(scheme_in(both_groups, module.c_str()).spec.block_cols, 32 << layer);
  }
}

json quark(const json& weight, const json& rows = nullptr) {
  return {{"quant_method", "quark"},
          {"global_quant_config", {{"weight", weight}, {"input_tensors", rows}}}};
}

TEST(QuarkConfig, WhatIsRead) {
  const json group = {
      {"dtype", "fp4"}, {"qscheme", "per_group"}, {"group_size", 32}, {"scale_format", "e8m0"}};
  EXPECT_EQ(read(quark(group)).weights->element, DType::kF4);
  for (const char* type : {"fp6_e2m3", "fp6_e3m2", "fp8_e4m3"}) {
    const auto found = read(quark(with(group, {{"dtype", type}}), group));
    ASSERT_TRUE(found.weights) << found.reason;
    EXPECT_EQ(found.weights->element, DType::kF8E4M3);
    EXPECT_EQ(found.weights->spec.block_cols, 32);
    EXPECT_FALSE(found.weights->note.empty());
  }
  const json tensor = {{"dtype", "fp8_e4m3"}, {"qscheme", "per_tensor"}, {"is_dynamic", false}};
  const auto fp8 = read(quark(tensor, tensor));
  EXPECT_EQ(fp8.weights->spec.weights, WeightScale::kTensor);
  EXPECT_EQ(fp8.weights->spec.activations, ActivationScale::kTensorStatic);
  expect_reason(quark(with(group, {{"scale_format", "float32"}})), "e8m0");
  expect_reason(quark(with(group, {{"dtype", "mx"}})), "mx");
  const json zeros = {{"dtype", "uint4"}, {"qscheme", "per_tensor"}, {"symmetric", false}};
  expect_reason(quark(zeros), "one zero point for a whole matrix");
  EXPECT_TRUE(read(quark(with(zeros, {{"qscheme", "per_channel"}}))).weights);
  json override = quark(group);
  override["layer_quant_config"] = {{"*.experts.*", {{"weight", tensor}}}};
  const auto found = read(override);
  ASSERT_TRUE(found.weights) << found.reason;
  EXPECT_EQ(scheme_in(found, "model.layers.0.mlp.experts.3.up_proj").element, DType::kF8E4M3);
  EXPECT_EQ(scheme_in(found, "model.layers.0.mlp.shared_expert.up_proj").element, DType::kF4);
}

TEST(QuarkConfig, ClassesAndNames_CountInTheOrderOfThePackage) {
  const json group = {
      {"dtype", "fp4"}, {"qscheme", "per_group"}, {"group_size", 32}, {"scale_format", "e8m0"}};
  const json bytes = {{"dtype", "int8"}, {"qscheme", "per_channel"}};
  const json floats = {{"dtype", "fp8_e4m3"}, {"qscheme", "per_tensor"}};
  json config = quark(group);
  config["layer_type_quant_config"] = {{"Conv2d", {{"weight", floats}}}};
  EXPECT_EQ(read(config).weights->element, DType::kF4) << "of another class";
  config["layer_type_quant_config"]["Linear"] = {{"weight", bytes}};
  EXPECT_EQ(read(config).weights->element, DType::kI8);
  config["layer_type_quant_config"] = nullptr;
  EXPECT_EQ(read(config).weights->element, DType::kF4) << "as older files have it";

  constexpr const char* kExact = "model.layers.0.mlp.experts.3.up_proj";
  config["layer_type_quant_config"] = {{"Linear", {{"weight", bytes}}}};
  config["layer_quant_config"] = json::object();
  config["layer_quant_config"]["*.experts.*"] = {{"weight", floats}};
  config["layer_quant_config"][kExact] = {{"weight", group}};
  const auto found = read(config);
  ASSERT_TRUE(found.weights) << found.reason;
  EXPECT_EQ(scheme_in(found, kExact).element, DType::kF4) << "its name stands behind the pattern";
  EXPECT_EQ(scheme_in(found, "model.layers.0.mlp.experts.2.up_proj").element, DType::kF8E4M3);
  EXPECT_EQ(scheme_in(found, "model.layers.0.mlp.shared_expert.up_proj").element, DType::kI8);
  config["layer_type_quant_config"]["Linear"]["weight"]["dtype"] = "int3";
  config.erase("layer_quant_config");
  expect_reason(config, "int3");
}

// As many of 32 names as Python's fnmatch finds.
TEST(QuarkConfig, PatternsOfNames_MeanWhatFnmatchMakesOfThem) {
  const json group = {
      {"dtype", "fp4"}, {"qscheme", "per_group"}, {"group_size", 32}, {"scale_format", "e8m0"}};
  const json bytes = {{"dtype", "int8"}, {"qscheme", "per_channel"}};
  const std::vector<std::pair<std::string, int>> patterns = {{"*.layers.[0-9].*", 24},
                                                             {"*.layers.1[0-9].*", 8},
                                                             {"*.experts.[!0-5].*", 8},
                                                             {"*.experts.[37].up_proj", 8},
                                                             {"*.experts.[0-9-]*.down_proj", 16},
                                                             {"*[u]p_proj", 16},
                                                             {"*.layers.[]0].*", 8},
                                                             {"*.layers.[", 0},
                                                             {"*[!]a]p_proj", 16},
                                                             {"*.experts.[a-].*", 0},
                                                             {"*[z-a]*", 0}};
  for (const auto& [pattern, expected] : patterns) {
    json config = quark(group);
    config["layer_quant_config"][pattern] = {{"weight", bytes}};
    const auto found = read(config);
    ASSERT_TRUE(found.weights) << found.reason;
    int count = 0;
    for (const int layer : {0, 1, 12, 9}) {
      for (const int expert : {0, 3, 7, 12}) {
        for (const char* matrix : {"up", "down"}) {
          const std::string name = "model.layers." + std::to_string(layer) + ".mlp.experts." +
                                   std::to_string(expert) + "." + matrix + "_proj";
          count += scheme_in(found, name).element == DType::kI8 ? 1 : 0;
        }
      }
    }
    EXPECT_EQ(count, expected) << pattern;
  }
}

TEST(QuarkConfig, RowsInGroups_HaveTheRuleThatTheConfigurationNames) {
  const json group = {
      {"dtype", "fp4"}, {"qscheme", "per_group"}, {"group_size", 32}, {"scale_format", "e8m0"}};
  const json rows = with(group, {{"is_dynamic", true}});
  const auto found = [&](const json& weight, const json& input) {
    return *read(quark(weight, input)).weights;
  };
  expect_rows(found(group, rows), DType::kF4, 32, RowScaleRule::kEvenPower);
  const json even = {{"scale_calculation_mode", "even"}};
  const json floor = {{"scale_calculation_mode", "floor"}, {"dtype", "fp6_e3m2"}};
  expect_rows(found(group, with(rows, even)), DType::kF4, 32, RowScaleRule::kEvenPower);
  expect_rows(found(group, with(rows, floor)), DType::kF6E3M2, 32, RowScaleRule::kFloorPower);
  const json six = with(group, {{"dtype", "fp6_e2m3"}});
  expect_rows(found(six, with(six, {{"is_dynamic", true}})), DType::kF6E2M3, 32,
              RowScaleRule::kEvenPower);
  expect_rows(found(group, with(rows, {{"dtype", "fp8_e5m2"}})), DType::kF8E5M2, 32,
              RowScaleRule::kEvenPower);
  expect_rows(found(group, with(rows, {{"dtype", "fp8_e4m3"}})), std::nullopt, 32,
              RowScaleRule::kEvenPower);
  expect_rows(found(group, with(rows, {{"scale_calculation_mode", "ceil"}})), DType::kF4, 32,
              RowScaleRule::kCeilPower);
  for (const json& other : {json{{"is_dynamic", false}}, json{{"scale_calculation_mode", "up"}},
                            json{{"scale_format", "float32"}}, json{{"dtype", "int8"}},
                            json{{"qscheme", "per_tensor"}}}) {
    SCOPED_TRACE(other.dump());
    expect_plain_rows(found(group, with(rows, other)));
  }
}

TEST(QuarkConfig, Integers_HaveTheRowsThatTheConfigurationNames) {
  const json channel = {{"dtype", "int8"}, {"qscheme", "per_channel"}, {"ch_axis", 0}};
  const json rows = {{"dtype", "int8"}, {"qscheme", "per_channel"}, {"is_dynamic", true}};
  const json stated = {{"dtype", "int8"}, {"qscheme", "per_tensor"}, {"is_dynamic", false}};
  for (const char* type : {"int8", "uint8"}) {
    const auto plain = read(quark(with(channel, {{"dtype", type}})));
    ASSERT_TRUE(plain.weights) << plain.reason;
    EXPECT_EQ(plain.weights->element, DType::kI8);
    EXPECT_EQ(plain.weights->spec, (QuantSpec{.weights = WeightScale::kChannel}));
  }
  const json asymmetric = with(channel, {{"symmetric", false}});
  const json group = with(channel, {{"qscheme", "per_group"}, {"group_size", 32}});
  const json four = with(group, {{"dtype", "int4"}});
  for (const json& weight : {channel, asymmetric, group, four}) {
    SCOPED_TRACE(weight.dump());
    const auto found = [&](const json& input) { return *read(quark(weight, input)).weights; };
    EXPECT_EQ(found(rows).spec.activations, ActivationScale::kToken);
    EXPECT_EQ(found(stated).spec.activations, ActivationScale::kTensorStatic);
    EXPECT_TRUE(found(rows).note.empty());
    for (const json& other :
         {json{{"dtype", "uint8"}}, json{{"symmetric", false}}, json{{"dtype", "fp8_e4m3"}},
          json{{"qscheme", "per_group"}}, json{{"is_dynamic", false}}}) {
      SCOPED_TRACE(other.dump());
      expect_plain_rows(found(with(rows, other)));
    }
  }
  // Floats have no bytes beside them.
  const json floats = {{"dtype", "fp8_e4m3"}, {"qscheme", "per_channel"}};
  expect_plain_rows(*read(quark(floats, rows)).weights);
  expect_reason(quark(with(asymmetric, {{"qscheme", "per_tensor"}})),
                "one zero point for a whole matrix");
  expect_reason(quark(with(channel, {{"dtype", "int3"}})), "int3");
}

TEST(CompressedTensorsConfig, RowsInGroups_FollowThePackage) {
  const auto config = [](const char* format, const json& weights, const json& rows) {
    return json{{"quant_method", "compressed-tensors"},
                {"format", format},
                {"config_groups",
                 {{"group_0",
                   {{"weights", weights}, {"input_activations", rows}, {"targets", {"Linear"}}}}}}};
  };
  const json mx = {{"num_bits", 4},       {"type", "float"},  {"symmetric", true},
                   {"strategy", "group"}, {"group_size", 32}, {"scale_dtype", "torch.uint8"},
                   {"dynamic", false}};
  const json mx_rows = with(mx, {{"dynamic", true}});
  const auto of_mx = [&](const json& rows) {
    return *read(config("mxfp4-pack-quantized", mx, rows)).weights;
  };
  expect_rows(of_mx(mx_rows), DType::kF4, 32, RowScaleRule::kEvenPower);
  expect_rows(of_mx(with(mx_rows, {{"num_bits", 6}})), DType::kF6E2M3, 32,
              RowScaleRule::kEvenPower);
  expect_rows(of_mx(with(mx_rows, {{"num_bits", 8}})), std::nullopt, 32, RowScaleRule::kHalfPower);
  EXPECT_EQ(of_mx(nullptr).spec.activations, ActivationScale::kNone);
  EXPECT_EQ(of_mx(nullptr).note, "");
  for (const json& other : {json{{"dynamic", false}}, json{{"group_size", 16}},
                            json{{"symmetric", false}}, json{{"num_bits", 3}}}) {
    SCOPED_TRACE(other.dump());
    expect_plain_rows(of_mx(with(mx_rows, other)));
  }
  const json nv = {{"num_bits", 4},
                   {"type", "float"},
                   {"strategy", "tensor_group"},
                   {"group_size", 16},
                   {"dynamic", false}};
  const json nv_rows = with(nv, {{"dynamic", "local"}});
  expect_rows(*read(config("nvfp4-pack-quantized", nv, nv_rows)).weights, DType::kF4, 16,
              RowScaleRule::kTwoLevel);
  expect_plain_rows(of_mx(nv_rows));
  expect_plain_rows(
      *read(config("nvfp4-pack-quantized", nv, with(nv, {{"dynamic", true}}))).weights);
}

TEST(CompressedTensorsConfig, RowsWithoutAType_HaveThatBesideTheWeights) {
  const auto spec_of = [](json weights, const json& rows) {
    weights.update({{"num_bits", 8}, {"type", "float"}});
    const auto found = read(
        {{"quant_method", "compressed-tensors"},
         {"config_groups", {{"group_0", {{"weights", weights}, {"input_activations", rows}}}}}});
    EXPECT_TRUE(found.weights) << found.reason;
    return found.weights ? found.weights->spec : QuantSpec();
  };
  const json channel = {{"strategy", "channel"}};
  const json block = {{"strategy", "block"}, {"block_structure", {64, 64}}};
  EXPECT_EQ(spec_of(channel, {{"dynamic", true}}).activations, ActivationScale::kToken);
  EXPECT_EQ(spec_of(channel, {{"dynamic", false}}).activations, ActivationScale::kTensorStatic);
  const QuantSpec grouped = spec_of(block, {{"dynamic", true}, {"strategy", "group"}});
  EXPECT_EQ(grouped.activations, ActivationScale::kGroup);
  EXPECT_EQ(grouped.activation_group, 64);
  json integers = {{"quant_method", "compressed-tensors"},
                   {"config_groups", {{"group_0", json::object()}}}};
  integers["config_groups"]["group_0"] = {
      {"weights", {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}}},
      {"input_activations", {{"num_bits", 8}, {"dynamic", true}}}};
  expect_reason(integers, "I8");
}

TEST(CompressedTensorsConfig, RowsBesideIntegers_AreInt8OrE4m3) {
  const auto found = [](const json& weights, const json& rows) {
    const json own = {{"symmetric", true}, {"strategy", "token"}, {"dynamic", true}};
    return read({{"quant_method", "compressed-tensors"},
                 {"format", "pack-quantized"},
                 {"config_groups",
                  {{"group_0", {{"weights", weights}, {"input_activations", with(own, rows)}}}}}});
  };
  const json four = {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 128}};
  const json e4m3 = {{"num_bits", 8}, {"type", "float"}};
  const json int8 = {{"num_bits", 8}, {"type", "int"}};
  const auto floats = found(four, e4m3);
  ASSERT_TRUE(floats.weights) << floats.reason;
  EXPECT_EQ(floats.weights->spec.activations, ActivationScale::kToken);
  EXPECT_EQ(floats.weights->spec.activation_dtype, DType::kF8E4M3);
  EXPECT_EQ(floats.weights->note, "");
  const auto integers = found(four, int8);
  ASSERT_TRUE(integers.weights) << integers.reason;
  EXPECT_EQ(integers.weights->spec.activation_dtype, std::nullopt);
  expect_reason_of(found(four, {{"num_bits", 8}, {"type", "int"}, {"symmetric", false}}),
                   "activations with zero points");

  for (const int64_t bits : {4, 8}) {
    const json zeros = with(four, {{"symmetric", false}, {"num_bits", bits}});
    const auto beside = found(zeros, int8);
    ASSERT_TRUE(beside.weights) << beside.reason;
    EXPECT_EQ(beside.weights->spec.zeros, WeightZero::kPoint);
    EXPECT_EQ(beside.weights->spec.activations, ActivationScale::kToken);
    expect_plain_rows(*found(zeros, e4m3).weights);
    expect_plain_rows(*found(with(four, {{"actorder", "group"}}), int8).weights);
  }
}

TEST(MlxConfig, IsKnownWithoutAMethod) {
  const json config = {{"bits", 4}, {"group_size", 64}};
  const auto found = read(config);
  ASSERT_TRUE(found.weights) << found.reason;
  EXPECT_EQ(found.method, "mlx");
  EXPECT_EQ(found.weights->spec.zeros, WeightZero::kOffset);
  EXPECT_TRUE(found.weights->spec.signed_scales);
  EXPECT_EQ(read(with(config, {{"bits", 6}})).weights->element, DType::kI8);
  for (const int64_t bits : {2, 3, 4, 5, 6, 8}) {
    const auto known = bits == 5 || bits == 6 ? std::optional(DType::kI6) : std::nullopt;
    const QuantSpec spec = read(with(config, {{"bits", bits}})).weights->spec;
    EXPECT_EQ(spec.gate_up_codes, MatrixCodes{.dtype = known}) << bits;
    EXPECT_EQ(spec.down_codes, MatrixCodes{.dtype = known}) << bits;
  }
  EXPECT_TRUE(read(with(config, {{"model.layers.0.mlp.gate", {{"bits", 8}}}})).weights);
  const std::string up = "model.layers.0.mlp.switch_mlp.up_proj";
  const auto own = read(with(config, {{up, {{"bits", 8}, {"group_size", 32}}}}));
  ASSERT_TRUE(own.weights) << own.reason;
  EXPECT_EQ(scheme_in(own, up).element, DType::kI8);
  EXPECT_EQ(scheme_in(own, up).spec.block_cols, 32);
  EXPECT_EQ(scheme_in(own, "model.layers.0.mlp.switch_mlp.down_proj").element, DType::kI4);
  expect_reason(with(config, {{up, {{"bits", 7}}}}), "7 bits");
  expect_reason(with(config, {{"mode", "mxfp4"}}), "mxfp4");
  expect_reason(with(config, {{"bits", 7}}), "7 bits");
}

json group_of(const json& weights, const json& targets) {
  return {{"weights", weights}, {"targets", targets}};
}

// Modules of 4 bits in groups, and modules of 8 bits by channel.
json two_groups(const json& first, const json& second) {
  const json four = {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 32}};
  const json eight = {{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"config_groups",
           {{"group_0", group_of(four, first)}, {"group_1", group_of(eight, second)}}}};
}

TEST(CompressedTensorsConfig, GroupsOfOtherModules_DoNotMatter) {
  const json experts = json::array({"re:.*mlp\\.experts\\.\\d+\\..*"});
  EXPECT_EQ(read(two_groups(experts, json::array({"re:.*self_attn.*"}))).weights->element,
            DType::kI4);
  EXPECT_EQ(
      read(two_groups(json::array({"re:.*self_attn.*"}), json::array({"Linear"}))).weights->element,
      DType::kI8);
}

TEST(CompressedTensorsConfig, GroupsOfExperts_BelongToModules) {
  const auto type_of = [](const checkpoint::Quantization& found, const char* module) {
    const auto* const scheme = checkpoint::scheme_of(*found.weights->by_module, module);
    return scheme == nullptr ? DType::kF32 : scheme->weights->element;
  };
  // The first name that holds counts, in the order of the groups, and names come before classes.
  const auto named =
      read(two_groups(json::array({"re:.*experts.*(gate|up)_proj"}), json::array({"re:.*proj"})));
  ASSERT_TRUE(named.weights) << named.reason;
  EXPECT_EQ(type_of(named, "model.layers.0.mlp.experts.3.up_proj"), DType::kI4);
  EXPECT_EQ(type_of(named, "model.layers.0.mlp.experts.3.down_proj"), DType::kI8);
  EXPECT_EQ(type_of(named, "model.layers.0.mlp.gate"), DType::kF32);
  const auto by_class = read(two_groups(json::array({"Linear"}), json::array({"re:.*w2$"})));
  ASSERT_TRUE(by_class.weights) << by_class.reason;
  EXPECT_EQ(type_of(by_class, "model.layers.0.block_sparse_moe.experts.3.w2"), DType::kI8);
  EXPECT_EQ(type_of(by_class, "model.layers.0.block_sparse_moe.experts.3.w1"), DType::kI4);
  expect_reason(two_groups(json::array({"Linear"}), json::array({"Linear"})), "differ");
}

TEST(QuarkConfig, PatternsOfModules) {
  checkpoint::ModuleSchemes found;
  using Kind = checkpoint::ModuleRule::Kind;
  found.schemes.resize(3);
  found.rules = {{.kind = Kind::kPattern, .text = "*experts.?.down*", .scheme = 1},
                 {.kind = Kind::kPattern, .text = "a*b*c", .scheme = 2}};
  const auto of = [&](const char* module) -> int64_t {
    const auto* const scheme = checkpoint::scheme_of(found, module);
    return scheme == nullptr ? -1 : scheme - found.schemes.data();
  };
  EXPECT_EQ(of("model.experts.3.down_proj"), 1);
  EXPECT_EQ(of("model.experts.13.down_proj"), -1);
  EXPECT_EQ(of("abxbc"), 2);
  EXPECT_EQ(of("abxbcd"), -1);
  EXPECT_EQ(of(""), -1);
}

TEST(CompressedTensorsConfig, ZerosOrdersAndSmallFloats) {
  const auto config = [](const char* format, const json& weights) {
    return json{{"quant_method", "compressed-tensors"},
                {"format", format},
                {"config_groups", {{"group_0", group_of(weights, json::array({"Linear"}))}}}};
  };
  json scheme = {{"num_bits", 4},       {"type", "int"},    {"symmetric", false},
                 {"strategy", "group"}, {"group_size", 32}, {"actorder", "group"}};
  const auto both = read(config("pack-quantized", scheme));
  ASSERT_TRUE(both.weights) << both.reason;
  EXPECT_EQ(both.weights->spec.zeros, WeightZero::kPoint);
  EXPECT_TRUE(both.weights->spec.has_column_order);
  scheme["num_bits"] = 6;
  EXPECT_EQ(read(config("pack-quantized", scheme)).weights->element, DType::kI8);
  expect_reason(config("marlin-24", scheme), "marlin-24");
  scheme = {{"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"group_size", 16}};
  EXPECT_TRUE(read(config("nvfp4-pack-quantized", scheme)).weights->spec.has_global_scale);
  scheme["strategy"] = "group";
  EXPECT_EQ(read(config("mxfp4-pack-quantized", scheme)).weights->element, DType::kF4);
  expect_reason(config("pack-quantized", scheme), "pack-quantized");
}

TEST(UnreadMethods, HaveReasons) {
  for (const char* method : {"aqlm", "hqq", "exl2", "exl3", "eetq", "vptq", "higgs", "quip", "spqr",
                             "torchao", "marlin", "fp_quant"}) {
    const auto found = read({{"quant_method", method}});
    EXPECT_FALSE(found.weights);
    EXPECT_FALSE(found.reason.empty()) << method;
  }
}

TEST(ModuleRules, Expressions) {
  using checkpoint::matches;
  const std::string name = "model.layers.10.mlp.experts.7.gate_proj";
  for (const char* yes : {"model",
                          ".*experts.*",
                          "model\\.layers\\.\\d+\\.mlp",
                          "(model|lm_head).*",
                          ".*gate_proj$",
                          "^model",
                          "model.layers.(1[0-9]|2[0-9]).*",
                          "(?:model)",
                          "[a-z]+\\.layers",
                          ".*experts.[^0]",
                          "",
                          "m?odel",
                          "model\\.layers\\.1+0",
                          ".*?mlp",
                          ".*[e-]x",
                          "x*modelx*\\.",
                          "(?!.*attn)",
                          "(?=.*mlp).*gate",
                          ".*\\.(?!8)\\d\\.",
                          "model\\.layers\\.\\d{2}\\.",
                          "(.*\\.){4}",
                          "x{0}m",
                          "x{0,3}m",
                          ".{5,}gate_proj$",
                          ".*\\bmlp\\b",
                          ".*\\d{1,3}?\\.mlp"}) {
    EXPECT_TRUE(matches(yes, name).value_or(false)) << yes;
  }
  for (const char* no :
       {"odel", ".*self_attn.*", "model\\.layers\\.\\d\\.", ".*gate_proj.$", "(lm_head|visual).*",
        ".*down_proj", "model.layers.2[0-9].*", "[^m].*", "(?!.*mlp)", "(?!model)(?=.*gate).*",
        "model\\.layers\\.\\d{3}", "x{1,}m", "(.*\\.){7}", ".*\\bate", "zzz{2}", "[^.]{6}"}) {
    EXPECT_EQ(matches(no, name), false) << no;
  }
  // An expression of another kind is matched by nothing.
  for (const char* unknown : {"(?<!a)b", "(?P<n>m)", "m{2,1}", "m{,2}", "m{999}", "m{2", "(zzz",
                              "zzz)", "[zzz", "*", "\\B", "(?!m"}) {
    EXPECT_FALSE(matches(unknown, name)) << unknown;
  }
  EXPECT_FALSE(matches(std::string(5000, '('), name));
  EXPECT_EQ(matches("(((((((.*)*)*)*)*)*)*)*x", name), true);
  EXPECT_EQ(matches("(a*)*(a*)*(a*)*b", std::string(40, 'a')), false);
  EXPECT_EQ(matches("(a{1,9}){1,9}b", std::string(99, 'a')), false);
  EXPECT_FALSE(matches(".*(?=.*(?=.*(?=.*a)))x", std::string(255, 'a')));  // takes too long
}

}  // namespace
}  // namespace conclave::testing
