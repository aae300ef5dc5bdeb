#include "conclave/reference.h"

#include "layer/packed_weights.h"
#include "layer/reference/arguments.h"
#include "layer/reference/float64_matrix.h"
#include "layer/reference/parts.h"
#include "layer/reference/routing.h"

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
  run_routed(context, spec, source, hidden, result);
  run_shared(context, spec, source, hidden, result);
  mix_parts(spec, source, hidden, result);
  run_residual(context, spec, source,
               args.residual_input.empty() ? hidden : to_float64(args.residual_input), result);
  result.output = result.routed;
  add_rows(result.shared, result.output);
  add_rows(result.residual, result.output);
  return result;
}

}  // namespace conclave::inline v0
