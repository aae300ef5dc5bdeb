// The CPU kernel of the experts, over the panel functions of any instruction set.
#pragma once

#include "experts/cpu/mlp_functions.h"
#include "experts/cpu/work_list.h"
#include "experts/kernel.h"
#include "experts/problem.h"

#include <memory>
#include <string>

namespace conclave::inline v0::experts {

struct ExpertMlpConfig {
  MlpFunctions functions;
  DType row_dtype = DType::kF32;  // for input and activated rows: kF32 or kBF16
  // Quantised rows become exact values of codes, of this type: kF32 or kBF16.
  DType code_dtype = DType::kF32;
  RowTiling tiling = {};
  std::string tile = {};  // "6x64"
  // The next panel is fetched while a task of more rows than this is computed.
  int64_t fetch_above_rows = 0;
};

// Config for products on tile registers: a group of 16 rows of bf16 times 64 columns at a time, for
// blocks of at most `block` rows.
inline ExpertMlpConfig tile_mlp_config(const MlpFunctions& functions, int64_t fetch_above_rows,
                                       int64_t block = RowTiling{}.block) {
  return {.functions = functions,
          .row_dtype = DType::kBF16,
          .tiling = {.tile = 16, .group = 16, .block = block},
          .tile = "16x64",
          .fetch_above_rows = fetch_above_rows};
}

// The same for rows of codes, which lie as they are.
inline ExpertMlpConfig coded_tile_config(const MlpFunctions& functions, int64_t fetch_above_rows) {
  return {.functions = functions,
          .code_dtype = DType::kBF16,
          .tiling = {.tile = 32},
          .tile = "32x64",
          .fetch_above_rows = fetch_above_rows};
}

// Config for products of whole numbers on tile registers: rows lie as they are.
inline ExpertMlpConfig integer_tile_config(const MlpFunctions& functions,
                                           int64_t fetch_above_rows) {
  return {.functions = functions,
          .tiling = {.tile = 16},
          .tile = "16x64",
          .fetch_above_rows = fetch_above_rows};
}

std::unique_ptr<ExpertsKernel> make_expert_mlp(const ExpertsProblem& problem,
                                               ExpertMlpConfig config);

}  // namespace conclave::inline v0::experts
