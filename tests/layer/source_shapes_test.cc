// A source with other shapes than the layer's is refused in every role, whatever differs.
#include "support/layer_parts.h"
#include "support/role_sources.h"

#include <gtest/gtest.h>

#include <string>

namespace conclave {
namespace {

using testing::code_of;
using testing::RedescribedSource;

MoeSpec every_part() {
  MoeSpec spec = testing::make_spec(6, 2, 40, 24, DType::kF8E4M3);
  spec.quant = {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic};
  spec.router = {.name = "sink_softmax",
                 .score = RouterScore::kSigmoid,
                 .has_selection_bias = true,
                 .has_global_scale = true};
  spec.shared = {.mode = SharedMode::kRouterWeight, .intermediate_size = 16, .count = 2};
  spec.has_bias = true;
  spec.has_output_bias = true;
  spec.latent = {.size = 28, .has_norm = true};
  spec.residual = {.intermediate_size = 12, .weight_dtype = DType::kBF16};
  return spec;
}

struct Change {
  const char* name;
  void (*apply)(WeightInfo& info);
};
constexpr Change kChanges[] = {{"one matrix more", [](WeightInfo& i) { ++i.count; }},
                               {"one matrix fewer", [](WeightInfo& i) { --i.count; }},
                               {"one row more", [](WeightInfo& i) { ++i.rows; }},
                               {"one row fewer", [](WeightInfo& i) { --i.rows; }},
                               {"one column more", [](WeightInfo& i) { ++i.cols; }},
                               {"one column fewer", [](WeightInfo& i) { --i.cols; }}};

TEST(SourceShapes, AnyCountRowsOrColumnsThatDiffer_AreRefusedNamingTheRole) {
  const MoeSpec spec = every_part();
  const Context context({.num_threads = 1});
  const auto source = make_synthetic_source(spec, 1);
  MoeLayer layer = MoeLayer::create(context, spec, *source);
  int cases = 0;
  for (const WeightId role : testing::roles_of(*source)) {
    for (const Change& change : kChanges) {
      SCOPED_TRACE(std::string(to_string(role)) + ", " + change.name);
      const RedescribedSource other(*source, role, change.apply);
      if (other.describe(role).count == 0) continue;
      EXPECT_EQ(code_of([&] { MoeLayer::create(context, spec, other); }), ErrorCode::kTensorShape);
      for (const ReloadMode mode : {ReloadMode::kStaged, ReloadMode::kInPlace}) {
        EXPECT_EQ(code_of([&] { layer.reload(other, mode); }), ErrorCode::kTensorShape);
      }
      ++cases;
    }
  }
  EXPECT_GT(cases, 100);
}

TEST(SourceShapes, RoleThatIsAbsent_IsMissing) {
  const MoeSpec spec = every_part();
  const Context context({.num_threads = 1});
  const auto source = make_synthetic_source(spec, 1);
  for (const WeightId role : testing::roles_of(*source)) {
    SCOPED_TRACE(to_string(role));
    const RedescribedSource other(*source, role, [](WeightInfo& info) { info = {}; });
    EXPECT_EQ(code_of([&] { MoeLayer::create(context, spec, other); }), ErrorCode::kTensorMissing);
  }
}

}  // namespace
}  // namespace conclave
