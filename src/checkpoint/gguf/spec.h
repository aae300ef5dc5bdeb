// The MoeSpec of a layer in a GGUF file.
#pragma once

#include "checkpoint/gguf/family.h"
#include "checkpoint/gguf/keys.h"
#include "checkpoint/gguf/layer_form.h"
#include "checkpoint/gguf/layer_tensors.h"

#include "conclave/error.h"
#include "conclave/spec.h"

namespace conclave::inline v0::checkpoint {

// Reads the sizes that all layers share. Throws Error(kConfigMissingKey, kConfigValue).
GgufSizes read_gguf_sizes(const GgufKeys& keys, const GgufFamily& family);

// `support` gets the reason if the layer cannot run. Throws Error(kConfigMissingKey, kConfigValue,
// kTensorMissing).
MoeSpec read_gguf_spec(const GgufKeys& keys, const GgufFamily& family, const GgufLayer& layer,
                       const GgufForm& form, Support& support);

}  // namespace conclave::inline v0::checkpoint
