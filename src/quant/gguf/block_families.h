// The functions that take blocks apart, by family of types.
#pragma once

#include "quant/gguf/block_type.h"

namespace conclave::inline v0::quant {

// 32 elements around one float16 scale; "_1" types have an offset, "_0" types a code that is 0.
void take_apart_q4_0(const std::byte* block, BlockParts& parts);
void take_apart_q4_1(const std::byte* block, BlockParts& parts);
void take_apart_q5_0(const std::byte* block, BlockParts& parts);
void take_apart_q5_1(const std::byte* block, BlockParts& parts);
void take_apart_q8_0(const std::byte* block, BlockParts& parts);
void take_apart_iq4_nl(const std::byte* block, BlockParts& parts);
void take_apart_q1_0(const std::byte* block, BlockParts& parts);
void take_apart_q2_0(const std::byte* block, BlockParts& parts);

// 4-bit floats with scales of powers of two, or of e4m3.
void take_apart_mxfp4(const std::byte* block, BlockParts& parts);
void take_apart_nvfp4(const std::byte* block, BlockParts& parts);

// 256 elements whose groups have scales of 4 to 8 bits, times one float16.
void take_apart_q2_k(const std::byte* block, BlockParts& parts);
void take_apart_q3_k(const std::byte* block, BlockParts& parts);
void take_apart_q4_k(const std::byte* block, BlockParts& parts);
void take_apart_q5_k(const std::byte* block, BlockParts& parts);
void take_apart_q6_k(const std::byte* block, BlockParts& parts);
void take_apart_iq4_xs(const std::byte* block, BlockParts& parts);

// 256 elements, of which 4 or 8 at once are a point of a grid.
void take_apart_iq1_s(const std::byte* block, BlockParts& parts);
void take_apart_iq1_m(const std::byte* block, BlockParts& parts);
void take_apart_iq2_xxs(const std::byte* block, BlockParts& parts);
void take_apart_iq2_xs(const std::byte* block, BlockParts& parts);
void take_apart_iq2_s(const std::byte* block, BlockParts& parts);
void take_apart_iq3_xxs(const std::byte* block, BlockParts& parts);
void take_apart_iq3_s(const std::byte* block, BlockParts& parts);

// 256 elements of -1, 0 and 1.
void take_apart_tq1_0(const std::byte* block, BlockParts& parts);
void take_apart_tq2_0(const std::byte* block, BlockParts& parts);

}  // namespace conclave::inline v0::quant
