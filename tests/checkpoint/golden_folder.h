// The folders of testdata/quantised, in memory, for tests that change them.
#pragma once

#include "checkpoint/tiny_model.h"

#include <string>

namespace conclave::testing {

TinyModel golden_folder(const std::string& name);

}  // namespace conclave::testing
