// Converts specs and options to and from Python dictionaries, with one list of fields for both.
#pragma once

#include "binding.h"

#include "conclave/format.h"
#include "conclave/layer.h"
#include "conclave/spec.h"
#include "conclave/tuning.h"

namespace conclave::python {

// Keys are the fields' names; nested structs are dictionaries, enumerators words, types torch's
// names. Missing fields keep their default. Throw Error naming the field: kInvalidArgument for an
// unknown key, kDType for a value of the wrong type, kUnknownName for a word.
MoeSpec spec_from_dict(const nb::dict& dict);
LayerOptions options_from_dict(const nb::dict& dict);
ParallelSpec parallel_from_dict(const nb::dict& dict);
TuningEntry tuning_entry_from_dict(const nb::dict& dict);

nb::dict spec_to_dict(const MoeSpec& spec);
nb::dict options_to_dict(const LayerOptions& options);
nb::dict parallel_to_dict(const ParallelSpec& parallel);
nb::dict tuning_entry_to_dict(const TuningEntry& entry);
nb::dict plan_to_dict(const Plan& plan);
nb::dict weight_form_to_dict(const WeightForm& form);

}  // namespace conclave::python
