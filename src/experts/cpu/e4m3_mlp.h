// The MLP of experts with e4m3 weights: quantises rows as the plan says, then multiplies panel by
// panel. docs/quantisation.md has each step.
#pragma once

#include "experts/e4m3_panel.h"
#include "experts/experts_kernel.h"

#include <memory>
#include <string>

namespace conclave::inline v0::experts {

struct E4m3MlpConfig {
  E4m3PanelFunction product = reference_e4m3_product;
  std::string tile = "1x1";
};
std::unique_ptr<ExpertsKernel> make_e4m3_mlp(const ExpertsProblem& problem, E4m3MlpConfig config);

// One translation unit per instruction set; each gives the same bits as reference_e4m3_product.
void e4m3_product_avx2(const E4m3PanelTask& task) noexcept;
void e4m3_product_avx512(const E4m3PanelTask& task) noexcept;

}  // namespace conclave::inline v0::experts
