// Rounds float32 rows to the 16-bit types, without branches so that compilers vectorise it. Equals
// float_to_f16 and float_to_bf16 of core/float_convert.h bit for bit.
#pragma once

#include <cstdint>

namespace conclave::inline v0::dispatch {

void round_to_f16(const float* values, int64_t count, uint16_t* out) noexcept;
void round_to_bf16(const float* values, int64_t count, uint16_t* out) noexcept;

}  // namespace conclave::inline v0::dispatch
