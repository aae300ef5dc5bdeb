// Tests the content of the plan: every row with its verdict, forced names, and the text of explain.

#include "experts/catalog.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>

namespace conclave {
namespace {

using testing::code_of;
using testing::make_layer;
using testing::make_spec;
using testing::OwnedLayer;

const PlanRow* chosen_row(const Plan& plan, const std::string& table) {
  for (const PlanRow& row : plan.rows) {
    if (row.table == table && row.chosen) return &row;
  }
  return nullptr;
}

TEST(Plan, EveryKernelRow_IsListedOnceWithAReason) {
  const Context context({.num_threads = 1});
  const Plan plan = make_plan(context, make_spec(8, 2, 64, 32, DType::kBF16));
  std::set<std::string> names;
  int chosen = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.table != "kernel") continue;
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_FALSE(row.reason.empty()) << row.name;
    chosen += row.chosen;
  }
  EXPECT_EQ(names.size(), experts::host_kernels().rows().size());
  EXPECT_EQ(chosen, 1);
  EXPECT_EQ(experts::host_kernels().rows().back().name, "cpu.reference");
}

TEST(Plan, Layer_CarriesTheSamePlanAsMakePlan) {
  const MoeSpec spec = make_spec(8, 2, 64, 32, DType::kBF16);
  const OwnedLayer owned = make_layer(spec);
  const Plan plan = make_plan(*owned.context, spec);
  EXPECT_EQ(explain(plan), explain(owned.layer.plan()));
  EXPECT_GT(plan.packed_bytes, size_t{8 * 3 * 64 * 32 * 2} - 1);
  EXPECT_EQ(plan.workspace_bytes, owned.layer.workspace_bytes());
}

TEST(Plan, ForcedKernel_RejectsTheOthersByName) {
  const Context context({.num_threads = 1});
  const Plan plan =
      make_plan(context, make_spec(8, 2, 64, 32, DType::kBF16), {.kernel = "cpu.reference"});
  ASSERT_NE(chosen_row(plan, "kernel"), nullptr);
  EXPECT_EQ(chosen_row(plan, "kernel")->name, "cpu.reference");
  EXPECT_EQ(plan.arithmetic, "f32_fma");
}

TEST(Plan, EveryIsa_ChoosesARowOfItsOwn) {
  for (const std::string& isa : testing::usable_isas()) {
    const Context context({.num_threads = 1, .isa = isa});
    const Plan plan = make_plan(context, make_spec(8, 2, 64, 32, DType::kBF16));
    ASSERT_NE(chosen_row(plan, "kernel"), nullptr) << isa;
    // The instructions of avx512_vnni are for codes beside rows of codes.
    const std::string expected = isa == "scalar"        ? "cpu.reference"
                                 : isa == "avx512_vnni" ? "cpu.avx512"
                                                        : "cpu." + isa;
    EXPECT_EQ(chosen_row(plan, "kernel")->name, expected);
    EXPECT_EQ(plan.isa, isa);
  }
}

TEST(Plan, NoCommunicator_SaysSoInsteadOfThrowing) {
  const Context context({.num_threads = 1});
  const Plan plan = make_plan(context, make_spec(8, 2, 64, 32, DType::kBF16), {}, {.ep_size = 2});
  EXPECT_EQ(chosen_row(plan, "dispatcher"), nullptr);
  const std::string text = explain(plan);
  EXPECT_NE(text.find("communicator"), std::string::npos) << text;
}

TEST(Context, Environment_IsReadOnlyWhenAsked) {
  ASSERT_EQ(setenv("CONCLAVE_NUM_THREADS", "3", 1), 0);
  ASSERT_EQ(setenv("CONCLAVE_ISA", "scalar", 1), 0);
  EXPECT_EQ(Context::from_environment().executor().concurrency(), 3);
  EXPECT_EQ(Context::from_environment().isa(), "scalar");
  EXPECT_EQ(Context::from_environment({.num_threads = 2}).executor().concurrency(), 2);
  EXPECT_EQ(Context({.num_threads = 1}).isa(), "");
  ASSERT_EQ(setenv("CONCLAVE_NUM_THREADS", "many", 1), 0);
  EXPECT_EQ(code_of([] { Context::from_environment(); }), ErrorCode::kInvalidArgument);
  unsetenv("CONCLAVE_NUM_THREADS");
  unsetenv("CONCLAVE_ISA");
  ASSERT_EQ(setenv("OMP_NUM_THREADS", "2,4", 1), 0);
  EXPECT_EQ(Context::from_environment().executor().concurrency(), 2);
  unsetenv("OMP_NUM_THREADS");
}

TEST(Context, BadOptions_AreTyped) {
  EXPECT_EQ(code_of([] { Context context({.isa = "neon"}); }), ErrorCode::kUnknownName);
  EXPECT_EQ(code_of([] { Context context({.num_threads = -1}); }), ErrorCode::kInvalidArgument);
  Context context({.num_threads = 1});
  EXPECT_EQ(code_of([&] { context.add_router("", nullptr); }), ErrorCode::kInvalidArgument);
  const RouterFactory factory = [](const MoeSpec&) { return std::unique_ptr<Router>(); };
  context.add_router("mine", factory);
  EXPECT_EQ(code_of([&] { context.add_router("mine", factory); }), ErrorCode::kInvalidArgument);
  MoeSpec spec = make_spec(4, 1, 8, 8, DType::kF32);
  spec.router.name = "mine";
  EXPECT_EQ(code_of([&] { make_plan(context, spec); }), ErrorCode::kInvalidArgument)
      << "the factory returned null";
}

}  // namespace
}  // namespace conclave
