// Tables of measured kernel choices.
#pragma once

#include "binding.h"

#include "conclave/tuning.h"

#include <memory>
#include <string>

namespace conclave::python {

// Returns the table given as an option: a TuningTable, or the path of a file; null for None.
// `field` names the option in errors. Throws as TuningTable::load.
std::shared_ptr<const TuningTable> tuning_from_python(const std::string& field, nb::handle object);

void bind_tuning(nb::module_& module);

}  // namespace conclave::python
