// Specs and options as dictionaries of Python, one list of fields for both directions.
#pragma once

#include "binding.h"

#include "conclave/layer.h"
#include "conclave/spec.h"

namespace conclave::python {

// Keys are the fields' names, nested structs are dictionaries, enumerators words, types the names
// that torch has. What is missing keeps its default. Throw Error naming the field: kInvalidArgument
// for a key that is none, kDType for a value of the wrong type, kUnknownName for a word.
MoeSpec spec_from_dict(const nb::dict& dict);
LayerOptions options_from_dict(const nb::dict& dict);
ParallelSpec parallel_from_dict(const nb::dict& dict);

nb::dict spec_to_dict(const MoeSpec& spec);
nb::dict options_to_dict(const LayerOptions& options);
nb::dict parallel_to_dict(const ParallelSpec& parallel);
nb::dict plan_to_dict(const Plan& plan);

}  // namespace conclave::python
