// The forms of weight_forms() that a method stores.
#include "convert/forms/catalog.h"
#include "convert/forms/method_form.h"

#include "conclave/format.h"

namespace conclave::inline v0::conversion {

std::vector<FormRow> scheme_forms() {
  std::vector<FormRow> rows;
  for (const WeightForm& form : weight_forms()) {
    const bool written =
        !form.method.empty() &&
        Quantiser::supports(
            {.codes = form.dtype, .quant = form.quant, .scale_dtype = form.scale_dtype});
    if (!written) continue;
    rows.push_back({.name = std::string(form.name),
                    .method = std::string(form.method),
                    .make = [form](FormOptions&, ScaleRule rule) -> FormPointer {
                      return std::make_shared<MethodTarget>(std::string(form.name),
                                                            method_form(form), rule);
                    }});
  }
  return rows;
}

}  // namespace conclave::inline v0::conversion
