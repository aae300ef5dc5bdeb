// Reloads layers of every form, staged and in place, with all weights and with one role at a time:
// afterwards the layer equals one made from the new weights, bit by bit.
#include "layer/coded_specs.h"
#include "quant/activation_rows.h"
#include "quant/weight_format.h"
#include "routing/router_tensors.h"
#include "support/in_sample.h"
#include "support/layer_parts.h"
#include "support/role_sources.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::run_layer;
using testing::same_bits;

constexpr int64_t kTokens = 5;
constexpr int64_t kHidden = 72;
constexpr int64_t kInner = 40;

struct Form {
  std::string name;
  MoeSpec spec;
};
void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

MoeSpec plain(DType dtype) { return testing::make_spec(4, 2, kHidden, kInner, dtype); }

// Every vector that a router can have, with zero experts beside it.
MoeSpec router_vectors() {
  MoeSpec spec = plain(DType::kF32);
  spec.num_zero_experts = 2;
  spec.router = {.score = RouterScore::kSigmoid,
                 .has_logit_bias = true,
                 .has_selection_bias = true,
                 .scale = 2.5,
                 .has_expert_scale = true,
                 .has_global_scale = true,
                 .input_norm = {.enabled = true}};
  return spec;
}

MoeSpec biases(DType dtype) {
  MoeSpec spec = plain(dtype);
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.activation = {.name = "swiglu_oai", .limit = 7, .alpha = 1.702, .beta = 1};
  spec.shared = {.mode = SharedMode::kSoftmaxMix, .intermediate_size = 24, .has_bias = true};
  return spec;
}

MoeSpec latent(DType dtype) {
  MoeSpec spec = plain(dtype);
  spec.latent = {.size = 48, .has_norm = true};
  spec.residual = {.intermediate_size = 20};
  spec.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 24};
  return spec;
}

MoeSpec weighed_shared() {
  MoeSpec spec = plain(DType::kBF16);
  spec.router = {.name = "sink_softmax",
                 .score = RouterScore::kSigmoid,
                 .has_selection_bias = true,
                 .has_global_scale = true};
  spec.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 24, .count = 2};
  return spec;
}

bool is_valid(const MoeSpec& spec) {
  try {
    validate(spec);
  } catch (const Error&) {
    return false;
  }
  return true;
}

// The planes of codes are what these fields say.
struct Planes {
  WeightScale scales = WeightScale::kTensor;
  WeightZero zeros = WeightZero::kNone;
  ActivationScale rows = ActivationScale::kNone;
  bool has_global_scale = false;
  bool has_column_order = false;
  bool has_column_factors = false;

  std::string name() const {
    const auto number = [](auto value) { return std::to_string(static_cast<int>(value)); };
    return "scales" + number(scales) + "_zeros" + number(zeros) + "_rows" + number(rows) +
           (has_global_scale ? "_global" : "") + (has_column_order ? "_order" : "") +
           (has_column_factors ? "_factors" : "");
  }
};

MoeSpec coded(DType dtype, const Planes& planes) {
  MoeSpec spec = plain(dtype);
  spec.quant = {.weights = planes.scales,
                .activations = planes.rows,
                .zeros = planes.zeros,
                .has_global_scale = planes.has_global_scale,
                .has_column_order = planes.has_column_order,
                .has_column_factors = planes.has_column_factors};
  if (planes.scales == WeightScale::kBlock) {
    spec.quant.block_rows = planes.has_column_order ? 1 : 24;
    spec.quant.block_cols = 32;
  }
  spec.has_bias = true;
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 24, .has_bias = true};
  return spec;
}

// Calls visit(planes) for every combination; validate() tells which of them weights can have.
template <class Visit>
void for_each_planes(const Visit& visit) {
  for (const auto scales : {WeightScale::kTensor, WeightScale::kChannel, WeightScale::kBlock}) {
    for (const auto zeros : {WeightZero::kNone, WeightZero::kPoint, WeightZero::kOffset}) {
      for (const auto rows : {ActivationScale::kNone, ActivationScale::kTensorStatic,
                              ActivationScale::kToken, ActivationScale::kGroup}) {
        for (unsigned bits = 0; bits < 8; ++bits) {
          visit(Planes{.scales = scales,
                       .zeros = zeros,
                       .rows = rows,
                       .has_global_scale = (bits & 1U) != 0,
                       .has_column_order = (bits & 2U) != 0,
                       .has_column_factors = (bits & 4U) != 0});
        }
      }
    }
  }
}

std::vector<Planes> planes_of(DType dtype) {
  std::vector<Planes> all;
  for_each_planes([&](const Planes& planes) {
    if (is_valid(coded(dtype, planes))) all.push_back(planes);
  });
  return all;
}

// Keeps the combinations of most planes: those with an order of columns, or with steps of rows.
std::vector<Form> fullest_forms(DType dtype) {
  const std::string format(quant::format_of(dtype).name);
  std::vector<Form> forms;
  for (const Planes& planes : planes_of(dtype)) {
    const bool has_steps = planes.rows == ActivationScale::kTensorStatic;
    if (!planes.has_global_scale || !planes.has_column_factors) continue;
    if (!planes.has_column_order && !has_steps) continue;
    if (has_steps && planes.scales != WeightScale::kTensor) continue;
    forms.push_back({format + "_" + planes.name(), coded(dtype, planes)});
  }
  return forms;
}

std::vector<DType> plain_types() {
  std::vector<DType> types;
  const auto catalog = quant::format_catalog();
  for (const quant::WeightFormat& format : catalog.rows()) {
    if (format.codes == nullptr) types.push_back(format.element);
  }
  return types;
}

std::vector<Form> plain_forms() {
  std::vector<Form> forms = {{"router_vectors", router_vectors()},
                             {"weighed_shared", weighed_shared()}};
  for (const DType dtype : plain_types()) {
    const std::string type(to_string(dtype));
    forms.push_back({"biases_" + type, biases(dtype)});
    forms.push_back({"latent_" + type, latent(dtype)});
  }
  MoeSpec fused = plain(DType::kF16);
  fused.shared = {.mode = SharedMode::kFusedSlots, .intermediate_size = 24, .count = 2};
  fused.activation.name = "relu2_no_mul";
  forms.push_back({"fused_slots_ungated", fused});
  MoeSpec on_input = plain(DType::kBF16);
  on_input.top_k = 1;
  on_input.weight_on = WeightOn::kInput;
  on_input.router.renormalize = Renormalize::kNone;
  forms.push_back({"weight_on_input", on_input});
  MoeSpec hash = plain(DType::kF32);
  hash.router = {.name = "hash", .score = RouterScore::kSqrtSoftplus, .vocab_size = 11};
  forms.push_back({"hash", hash});
  MoeSpec any = plain(DType::kF32);
  any.router.name = "top_any";
  forms.push_back({"top_any", any});
  return forms;
}

std::vector<Form> all_forms() {
  std::vector<Form> forms = plain_forms();
  for (const DType dtype : testing::coded_types()) {
    for (Form& form : fullest_forms(dtype)) forms.push_back(std::move(form));
    if (!quant::takes_int8_rows(dtype)) continue;
    MoeSpec whole = coded(dtype, {.scales = WeightScale::kChannel});
    if (!is_valid(whole)) whole.quant.zeros = WeightZero::kPoint;
    forms.push_back({"int8_rows_" + std::string(to_string(dtype)), with_int8_rows(whole)});
  }
  MoeSpec biased = coded(DType::kF8E4M3,
                         {.scales = WeightScale::kTensor, .rows = ActivationScale::kTensorStatic});
  biased.shared.weight_dtype = DType::kBF16;
  forms.push_back({"e4m3_biased_beside_plain_shared", biased});
  return forms;
}

class Reloading : public ::testing::Test {
 protected:
  Reloading() {
    for (int32_t t = 0; t < kTokens; ++t) token_ids_.as<int32_t>()[t] = (t * 7) % 11;
  }
  Tensor fresh(const MoeSpec& spec, const WeightSource& source) const {
    return run(MoeLayer::create(context_, spec, source, {.max_tokens = 8}));
  }
  // Reloads the layer of `first` with `second`.
  void expect_reloads(const MoeSpec& spec, const WeightSource& first,
                      const WeightSource& second) const {
    const Tensor expected = fresh(spec, second);
    for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
      SCOPED_TRACE(mode == ReloadMode::kStaged ? "staged" : "in place");
      MoeLayer layer = MoeLayer::create(context_, spec, first, {.max_tokens = 8});
      layer.reload(second, mode);
      EXPECT_TRUE(same_bits(run(layer), expected));
    }
  }
  // Reloads with other weights, all of them.
  void expect_reloads_all(const MoeSpec& spec) const {
    const auto first = make_synthetic_source(spec, 3);
    const auto second = make_synthetic_source(spec, 4);
    ASSERT_FALSE(same_bits(fresh(spec, *first), fresh(spec, *second)));
    expect_reloads(spec, *first, *second);
  }

 private:
  Tensor run(const MoeLayer& layer) const {
    ForwardArgs args;
    if (layer.spec().router.name == "hash") args.token_ids = token_ids_.const_view();
    return run_layer(layer, hidden_.view(), DType::kF32, args).out;
  }

  Context context_{{.num_threads = 1}};
  Tensor hidden_ = testing::random_tensor(DType::kF32, kTokens, kHidden, 5);
  Tensor token_ids_{DType::kI32, {kTokens}};
};

// Gate and up multiply the same rows, so that the factors of these rows change together. Other
// roles change alone.
WeightId partner_of(WeightId role) {
  if (role.plane() != WeightPlane::kColumnFactor) return role;
  if (role.matrix() == WeightMatrix::kGate) {
    return {*role.mlp(), WeightMatrix::kUp, WeightPlane::kColumnFactor};
  }
  if (role.matrix() == WeightMatrix::kUp) {
    return {*role.mlp(), WeightMatrix::kGate, WeightPlane::kColumnFactor};
  }
  return role;
}

class ReloadForm : public Reloading, public ::testing::WithParamInterface<Form> {};

TEST_P(ReloadForm, AllWeights_GiveTheBitsOfAFreshLayer) { expect_reloads_all(GetParam().spec); }

// A role that keeps its old value would hide behind the others.
TEST_P(ReloadForm, OneRole_GivesTheBitsOfAFreshLayer) {
  const MoeSpec& spec = GetParam().spec;
  const auto first = make_synthetic_source(spec, 3);
  const auto second = make_synthetic_source(spec, 4);
  for (const WeightId role : testing::roles_of(*first)) {
    SCOPED_TRACE(to_string(role));
    const testing::MixedSource other(*first, *second, role);
    const testing::MixedSource both(other, *second, partner_of(role));
    expect_reloads(spec, *first, both);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, ReloadForm, ::testing::ValuesIn(all_forms()),
                         [](const auto& test) { return test.param.name; });

// No weights have scales of scales yet, a residual MLP has values alone, and ids of tensors of
// routers are kept for routers to come.
bool can_have(WeightId role) {
  if (role.plane() == WeightPlane::kSecondScale) return false;
  for (size_t number = 0; number < weights::kMaxRouterTensors; ++number) {
    if (role == weights::router_tensor(number)) return routing::find_router_tensor(role) != nullptr;
  }
  return role.mlp() != WeightMlp::kResidual || role.plane() == WeightPlane::kWeights;
}

// A form for each array that layers can have: a new one needs a form above.
TEST(ReloadForms, EveryArray_IsReloaded) {
  std::set<size_t> reloaded;
  for (const Form& form : all_forms()) {
    for (const WeightId role : testing::roles_of(*make_synthetic_source(form.spec, 3))) {
      reloaded.insert(role.index());
    }
  }
  for (const WeightId role : weights::kAll) {
    EXPECT_EQ(reloaded.contains(role.index()), can_have(role)) << to_string(role);
  }
}

class ReloadCodes : public Reloading, public ::testing::WithParamInterface<DType> {};

TEST_P(ReloadCodes, EveryCombinationOfPlanes_GivesTheBitsOfAFreshLayer) {
  const std::vector<Planes> all = planes_of(GetParam());
  EXPECT_GT(all.size(), 50U);
  size_t place = testing::first_place();
  for (const Planes& planes : all) {
    if (!testing::in_sample(place++, 4)) continue;
    SCOPED_TRACE(planes.name());
    expect_reloads_all(coded(GetParam(), planes));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Catalog, ReloadCodes, ::testing::ValuesIn(testing::coded_types()),
                         [](const auto& test) {
                           return std::string(quant::format_of(test.param).name);
                         });

}  // namespace
}  // namespace conclave
