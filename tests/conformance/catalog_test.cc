// Every row of every catalog runs somewhere: a row that no problem on any machine can choose is
// dead.

#include "experts/catalog.h"

#include "activation/activations.h"
#include "dispatch/dispatcher.h"
#include "routing/router.h"
#include "routing/routing_problem.h"
#include "support/layer_fixture.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace conclave {
namespace {

constexpr cpu::Isa kIsas[] = {cpu::Isa::kScalar,     cpu::Isa::kAvx2,       cpu::Isa::kAvx512,
                              cpu::Isa::kAvx512Vnni, cpu::Isa::kAvx512Bf16, cpu::Isa::kAmx};

// Every CPU and arithmetic that a problem may ask for.
std::vector<experts::CpuTarget> all_targets() {
  std::vector<experts::CpuTarget> targets;
  for (const cpu::Isa isa : kIsas) {
    for (const auto arithmetic : {cpu::Arithmetic::kF32Fma, cpu::Arithmetic::kDpBf16,
                                  cpu::Arithmetic::kAmxBf16, cpu::Arithmetic::kInt8Dot}) {
      for (const bool has_avx_vnni : {false, true}) {
        targets.push_back({.isa = isa, .arithmetic = arithmetic, .has_avx_vnni = has_avx_vnni});
      }
    }
  }
  return targets;
}

TEST(KernelCatalog, EveryRow_IsChosenForSomeProblem) {
  std::set<std::string_view> chosen;
  for (const experts::CpuTarget& target : all_targets()) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8}) {
      QuantSpec quant;
      if (dtype == DType::kI8) {
        quant = {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
      }
      for (const auto& row : experts::host_kernels().rows()) {
        if (!row.supports({.num_local_experts = 4,
                           .hidden_size = 64,
                           .intermediate_size = 32,
                           .weight_dtype = dtype,
                           .quant = quant,
                           .target = target})) {
          continue;
        }
        chosen.insert(row.name);
        break;
      }
    }
  }
  for (const auto& row : experts::host_kernels().rows()) {
    EXPECT_TRUE(chosen.contains(row.name)) << row.name;
  }
}

TEST(KernelCatalog, LastRow_SupportsEveryWeightTypeInFloat32) {
  const auto& last = experts::host_kernels().rows().back();
  EXPECT_EQ(last.name, "cpu.reference");
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    EXPECT_TRUE(last.supports(
        {.num_local_experts = 1, .hidden_size = 1, .intermediate_size = 1, .weight_dtype = dtype}));
  }
}

TEST(KernelCatalog, ARejection_AlwaysHasAReason) {
  for (const auto& row : experts::host_kernels().rows()) {
    for (const cpu::Isa isa : kIsas) {
      const Support support = row.supports(
          {.num_local_experts = 1,
           .hidden_size = 8,
           .intermediate_size = 8,
           .weight_dtype = DType::kF16,
           .target = experts::CpuTarget{.isa = isa, .arithmetic = cpu::Arithmetic::kDpBf16}});
      if (!support) {
        EXPECT_FALSE(support.reason().empty()) << row.name;
      }
    }
  }
}

TEST(RouterCatalog, EveryRow_RunsInALayer) {
  for (const auto& row : routing::router_catalog().rows()) {
    MoeSpec spec = testing::spec_of_row(row.name);
    spec.hidden_size = 32;
    spec.intermediate_size = 16;
    spec.weight_dtype = DType::kF32;
    for (const Renormalize renormalize : {Renormalize::kNone, Renormalize::kSum}) {
      spec.router.renormalize = renormalize;
      const auto owned = testing::make_layer(spec);
      const Tensor hidden = testing::random_tensor(DType::kF32, 11, 32, 1);
      Tensor token_ids(DType::kI64, {11});
      for (int64_t token = 0; token < 11; ++token) token_ids.as<int64_t>()[token] = 4 * token;
      const auto output = testing::run_layer(owned.layer, hidden.view(), DType::kF32,
                                             {.token_ids = token_ids.view()});
      LayerResult result = output.result(hidden.view());
      result.token_ids = token_ids.view();
      const StageCheck check = check_against_reference(*owned.context, spec, *owned.source, result);
      EXPECT_EQ(check.routing_mismatches, 0) << row.name;
      EXPECT_LE(check.worst_weight_error, 1e-6) << row.name;
      EXPECT_LE(check.worst_token_error, accuracy_bar(DType::kF32, DType::kF32)) << row.name;
    }
  }
}

TEST(DispatcherCatalog, EveryRow_IsChosenForSomeProblem) {
  const auto group = make_local_group({.num_ranks = 2});
  std::set<std::string_view> chosen;
  for (const int32_t ranks : {1, 2}) {
    for (const EpTransport transport : {EpTransport::kVariable, EpTransport::kFixedSlots}) {
      for (const auto& row : dispatch::dispatcher_catalog().rows()) {
        if (!row.supports({.max_tokens = 4,
                           .top_k = 2,
                           .num_experts = 4,
                           .hidden_size = 8,
                           .row_bytes = 64,
                           .ep_size = ranks,
                           .transport = transport,
                           .communicator = group[0].get()})) {
          continue;
        }
        chosen.insert(row.name);
        break;
      }
    }
  }
  for (const auto& row : dispatch::dispatcher_catalog().rows()) {
    EXPECT_TRUE(chosen.contains(row.name)) << row.name;
  }
}

}  // namespace
}  // namespace conclave
