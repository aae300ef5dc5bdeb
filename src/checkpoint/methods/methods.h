// The readers of the methods' configurations, for their table.
#pragma once

#include "checkpoint/methods/method.h"

namespace conclave::inline v0::checkpoint {

QuantizedWeights read_fp8(const io::JsonValue& config);
QuantizedWeights read_compressed_tensors(const io::JsonValue& config);
QuantizedWeights read_modelopt(const io::JsonValue& config);
QuantizedWeights read_gptq(const io::JsonValue& config);
QuantizedWeights read_awq(const io::JsonValue& config);

// Codes of a format whose usual storage is words of 32 bits, as a layer's spec gives them.
QuantizedWeights codes_in_words(DType element, const QuantSpec& spec);

}  // namespace conclave::inline v0::checkpoint
