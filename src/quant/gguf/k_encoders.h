// Makes blocks of the types whose groups have small integers as scales, the inverse of
// take_apart_q2_k and its kin.
#pragma once

#include "quant/gguf/block_encoder.h"

#include <span>

namespace conclave::inline v0::quant {

std::span<const BlockEncoder> k_encoders() noexcept;

}  // namespace conclave::inline v0::quant
