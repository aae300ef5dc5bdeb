// The model of a feed that has a spec in place of a config.json.
#pragma once

#include "checkpoint/model_config.h"

#include "conclave/dtype.h"
#include "conclave/spec.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// A model of layers of one spec, by the names of a family. Throws as CheckpointFeed::from_spec.
ModelConfig model_of(const MoeSpec& spec, std::string_view model_type,
                     std::span<const int64_t> layers);

// The method that the text of a quantization_config describes, for weights that hold values
// otherwise, with its rules for modules or as these say of some. Throws
// Error(kUnsupportedQuantization).
QuantizedWeights read_method(std::string_view text, DType weight_dtype,
                             std::span<const std::string> modules);

}  // namespace conclave::inline v0::checkpoint
