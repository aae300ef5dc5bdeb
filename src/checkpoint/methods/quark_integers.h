// Integer codes of the method "quark".
#pragma once

#include "checkpoint/methods/method.h"

#include <cstdint>

namespace conclave::inline v0::checkpoint {

struct QuarkIntegers {
  int64_t bits = 0;
  bool has_signs = true;
};

// Reads what an entry's "weight" says of such codes, whose scales are those of `spec`.
QuantizedWeights read_quark_integers(const io::JsonValue& config, const io::JsonValue& weight,
                                     const QuantSpec& spec, QuarkIntegers codes);

}  // namespace conclave::inline v0::checkpoint
