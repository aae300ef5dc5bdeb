// Reads what the keys of a GGUF model say, and finds its layers by its tensors, wherever these are.
#pragma once

#include "checkpoint/gguf/family.h"
#include "checkpoint/gguf/keys.h"
#include "checkpoint/gguf/layer_form.h"
#include "checkpoint/gguf/layer_tensors.h"
#include "io/gguf/header.h"

#include "conclave/checkpoint.h"

#include <cstdint>
#include <string>

namespace conclave::inline v0::checkpoint {

struct GgufModel {
  // The header must outlive it; errors name `file`. Throws Error(kUnknownArchitecture,
  // kConfigMissingKey, kConfigValue).
  GgufModel(const io::GgufHeader& header, const std::string& file);

  std::string architecture() const { return "gguf " + keys.architecture(); }

  GgufKeys keys;
  const GgufFamily& family;
  int64_t num_blocks = 0;         // with extra layers
  int64_t num_hidden_layers = 0;  // the first of them
  GgufSizes sizes;
};

// Throws as read_gguf_spec.
CheckpointLayer describe_gguf_layer(const GgufModel& model, const GgufLayer& layer,
                                    const GgufForm& form);

}  // namespace conclave::inline v0::checkpoint
