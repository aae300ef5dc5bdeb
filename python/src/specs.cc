#include "specs.h"

#include "context.h"
#include "fields.h"

#include "conclave/layer.h"
#include "conclave/spec.h"

#include <utility>

namespace conclave::python {

void bind_specs(nb::module_& module) {
  module.def(
      "make_plan",
      [](const PyContext& context, const nb::dict& spec, const nb::dict& options,
         const nb::dict& parallel) {
        const Plan plan = make_plan(context.context(), spec_from_dict(spec),
                                    options_from_dict(options), parallel_from_dict(parallel));
        nb::dict dict = plan_to_dict(plan);
        dict["text"] = explain(plan);
        return dict;
      },
      nb::arg("context"), nb::arg("spec"), nb::arg("options"), nb::arg("parallel"),
      "The plan that a layer of this spec would have, without weights.");
  module.def(
      "default_spec", [] { return spec_to_dict(MoeSpec{}); },
      "Every field of a spec with its default.");
  module.def(
      "default_options", [] { return options_to_dict(LayerOptions{}); },
      "Every option of a layer with its default.");
  module.def(
      "default_parallel", [] { return parallel_to_dict(ParallelSpec{}); },
      "Every field of a split with its default.");
  module.def(
      "check_spec", [](const nb::dict& spec) { validate(spec_from_dict(spec)); }, nb::arg("spec"),
      "Raises where a spec is not valid, naming the field.");
  module.def(
      "count_parameters",
      [](const nb::dict& spec) {
        const ParameterCount count = count_parameters(spec_from_dict(spec));
        return std::pair(count.total, count.active);
      },
      nb::arg("spec"), "Weight elements of a layer: all, and those that a token uses.");
  module.def(
      "weight_forms",
      [] {
        nb::list forms;
        for (const WeightForm& form : weight_forms()) forms.append(weight_form_to_dict(form));
        return nb::typed<nb::list, nb::dict>(std::move(forms));
      },
      "The forms of weights that tools offer by name.");
}

}  // namespace conclave::python
