// The MLPs of a layer ask kernels to solve these problems, on any device.
#pragma once

#include "experts/problem.h"
#include "layer/lent_experts.h"
#include "layer/rank_part.h"

#include "conclave/layer.h"
#include "conclave/spec.h"

#include <cstdint>
#include <optional>

namespace conclave::inline v0 {

// One problem for each kind of MLP that a rank holds.
struct MlpProblems {
  experts::ExpertsProblem routed;
  std::optional<experts::ExpertsProblem> shared = {};    // S experts, which every row uses
  std::optional<experts::ExpertsProblem> residual = {};  // one expert, which every row uses
};

struct MlpRequest {
  const MoeSpec& spec;
  const RankPart& part;
  int64_t max_tokens = 0;
  int64_t max_adapter_rank = 0;
  experts::Target target = {};
  InPlaceParts in_place = {};
};
MlpProblems mlp_problems(const MlpRequest& request);

// The form in which a slice of the intermediate rows holds its numbers. Those in steps share
// columns of the whole matrix, of which a slice that begins among them has a part: it holds them as
// float32.
QuantSpec quant_of_slice(QuantSpec quant, const TensorSlice& inner);

// Throws Error(kInvalidArgument) if the target cannot take calls of so many tokens.
void check_options(const LayerOptions& options, const experts::Target& target);

}  // namespace conclave::inline v0
