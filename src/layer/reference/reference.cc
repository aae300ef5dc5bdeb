#include "conclave/reference.h"

#include "layer/packed_weights.h"
#include "layer/reference/arguments.h"
#include "layer/reference/float64_matrix.h"
#include "layer/reference/parts.h"
#include "layer/reference/routing.h"

#include <cmath>
#include <vector>

namespace conclave::inline v0 {
namespace {

// `rows` are [T, H] like `sum`, or empty.
void add_rows(const std::vector<double>& rows, std::vector<double>& sum) {
  for (size_t index = 0; index < rows.size(); ++index) sum[index] += rows[index];
}

}  // namespace

ReferenceResult reference_forward(const Context& context, const MoeSpec& spec,
                                  const WeightSource& source, const ReferenceArgs& args) {
  validate(spec);
  check_source(spec, source);
  check_reference_arguments(args, spec);
  const Float64Matrix hidden = to_float64(args.hidden);
  ReferenceResult result;
  reference_routing(spec, source, args, result);
  Allowances allowances{.codes = {.ambiguity = args.code_ambiguity, .slices = args.tp_size},
                        .routed = {},
                        .shared = {}};
  const AdaptedRows rows{.hidden = hidden, .adapters = ReferenceAdapters(args)};
  run_routed(context, spec, source, rows, result, allowances);
  run_shared(context, spec, source, rows, result, allowances);
  mix_parts(spec, source, hidden, result, allowances);
  run_residual(context, spec, source,
               args.residual_input.empty() ? hidden : to_float64(args.residual_input), result);
  result.output = result.routed;
  add_rows(result.shared, result.output);
  add_rows(result.residual, result.output);
  for (size_t token = 0; token < allowances.routed.size(); ++token) {
    result.allowance.push_back(std::sqrt(allowances.routed[token] + allowances.shared[token]));
  }
  return result;
}

}  // namespace conclave::inline v0
