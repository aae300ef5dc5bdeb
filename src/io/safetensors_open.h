// Opens a safetensors file that is already a descriptor: a member of a model directory.
#pragma once

#include "io/file.h"

#include "conclave/safetensors.h"

namespace conclave::inline v0::io {

// SafetensorsFile::open for an opened file: refuses foreign formats, reads and validates the
// header.
SafetensorsFile open_safetensors(File file);

}  // namespace conclave::inline v0::io
