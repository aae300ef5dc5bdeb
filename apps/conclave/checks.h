// Measures how far a layer's results are from the truth.
#pragma once

#include "input/tensor_file.h"
#include "layer_run.h"

#include "conclave/reference.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace conclave::tool {

struct CheckResult {
  int64_t tokens = 0;      // number of tokens compared
  double worst_error = 0;  // relative L2 of the worst token
  int64_t worst_token = -1;
  double tolerance = 0;
  std::optional<int64_t> routing_mismatches;  // tokens whose set of experts differs
  std::optional<int64_t> order_mismatches;    // tokens with the same experts in another order
  std::optional<double> logit_error;
  std::optional<double> weight_error;
  bool ok = false;
  std::string reason;  // why the check failed
};

// Checks every token against recorded outputs. A recorded routing is compared and reported, but the
// output alone decides. The reason says so if all tokens outside tolerance chose other experts in a
// near tie of the gate.
CheckResult check_against_file(const LayerTensors& reference, int64_t layer, const MoeSpec& spec,
                               const LayerRun& run, double tolerance);

// Checks `sample` tokens, spread evenly over the batch, against the built-in float64 layer: the
// output, and each stage of the routing on the layer's own intermediate results.
CheckResult check_against_float64(const Context& context, const MoeSpec& spec,
                                  const WeightSource& source, const LayerInput& input,
                                  const LayerRun& run, int64_t sample, double tolerance);

// The tokens are evenly spread and ascending; all of them if there are no more than `sample`.
std::vector<int64_t> sample_tokens(int64_t num_tokens, int64_t sample);

// The largest logit error that rounding alone explains, relative to |x| |w|, in the gate's rounding
// type.
double logit_bar(const MoeSpec& spec);

}  // namespace conclave::tool
