// Compares the experts that a layer chose with those that a file gives.
#pragma once

#include "layer_run.h"

#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstdint>
#include <vector>

namespace conclave::tool {

// Whether the router weighs shared experts as well, which its choices of the others do not say.
bool router_weighs_shared(const MoeSpec& spec);

struct ChoiceDifferences {
  std::vector<int64_t> other_experts;  // tokens whose set of experts differs, ascending
  int64_t reordered = 0;               // tokens with the same experts in another order
};
// Both are [T, k], int32 or int64. An id that a token repeats counts each time.
ChoiceDifferences compare_choices(const Tensor& actual, const Tensor& expected);

// Whether rounding alone explains that `token` chose other experts than the file: its logits agree
// with the file's, if it has any, and those of the experts that only one of them chose are equal,
// both within twice what the gate's rounding can move the row's largest. If a selection bias or
// groups also decide, logits that agree without being identical are taken as the reason.
bool is_near_tie(const MoeSpec& spec, const LayerRun& run, const Tensor* file_logits,
                 const Tensor& file_ids, int64_t token);

}  // namespace conclave::tool
