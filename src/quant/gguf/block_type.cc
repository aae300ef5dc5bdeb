#include "quant/gguf/block_type.h"

#include "quant/gguf/block_families.h"

#include <algorithm>
#include <array>

namespace conclave::inline v0::quant {
namespace {

constexpr auto kF16 = ScaleValues::kF16;
constexpr auto kPowerOfTwo = ScaleValues::kPowerOfTwo;
constexpr auto kSteps = ScaleValues::kSteps;

constexpr std::array kTypes = {
    BlockType{"Q4_0", 32, 18, 32, -8, 7, false, take_apart_q4_0, kF16},
    BlockType{"Q4_1", 32, 20, 32, 0, 15, true, take_apart_q4_1, kF16},
    BlockType{"Q5_0", 32, 22, 32, -16, 15, false, take_apart_q5_0, kF16},
    BlockType{"Q5_1", 32, 24, 32, 0, 31, true, take_apart_q5_1, kF16},
    BlockType{"Q8_0", 32, 34, 32, -128, 127, false, take_apart_q8_0, kF16},
    BlockType{"Q2_K", 256, 84, 16, 0, 3, true, take_apart_q2_k, kSteps},
    BlockType{"Q3_K", 256, 110, 16, -4, 3, false, take_apart_q3_k, kSteps},
    BlockType{"Q4_K", 256, 144, 32, 0, 15, true, take_apart_q4_k, kSteps},
    BlockType{"Q5_K", 256, 176, 32, 0, 31, true, take_apart_q5_k, kSteps},
    BlockType{"Q6_K", 256, 210, 16, -32, 31, false, take_apart_q6_k, kSteps},
    BlockType{"IQ2_XXS", 256, 66, 32, -43, 43, false, take_apart_iq2_xxs, kSteps},
    BlockType{"IQ2_XS", 256, 74, 16, -43, 43, false, take_apart_iq2_xs, kSteps},
    BlockType{"IQ3_XXS", 256, 98, 32, -62, 62, false, take_apart_iq3_xxs, kSteps},
    BlockType{"IQ1_S", 256, 50, 32, -9, 9, false, take_apart_iq1_s, kSteps},
    BlockType{"IQ4_NL", 32, 18, 32, -127, 113, false, take_apart_iq4_nl, kF16, DType::kIQ4},
    BlockType{"IQ3_S", 256, 110, 32, -15, 15, false, take_apart_iq3_s, kSteps},
    BlockType{"IQ2_S", 256, 82, 16, -43, 43, false, take_apart_iq2_s, kSteps},
    BlockType{"IQ4_XS", 256, 136, 32, -127, 113, false, take_apart_iq4_xs, kSteps, DType::kIQ4},
    BlockType{"IQ1_M", 256, 56, 16, -9, 9, false, take_apart_iq1_m, kSteps},
    BlockType{"TQ1_0", 256, 54, 256, -1, 1, false, take_apart_tq1_0, kF16},
    BlockType{"TQ2_0", 256, 66, 256, -1, 2, false, take_apart_tq2_0, kF16},
    BlockType{"MXFP4", 32, 17, 32, -12, 12, false, take_apart_mxfp4, kPowerOfTwo, DType::kF4},
    BlockType{"NVFP4", 64, 36, 16, -12, 12, false, take_apart_nvfp4, kF16, DType::kF4},
    BlockType{"Q1_0", 128, 18, 128, -1, 1, false, take_apart_q1_0, kF16},
    BlockType{"Q2_0", 64, 18, 64, -1, 2, false, take_apart_q2_0, kF16},
};

}  // namespace

std::span<const BlockType> block_types() noexcept { return kTypes; }

const BlockType* find_block_type(std::string_view name) noexcept {
  const auto* at = std::find_if(kTypes.begin(), kTypes.end(),
                                [name](const BlockType& type) { return type.name == name; });
  return at != kTypes.end() ? at : nullptr;
}

void decode_blocks(const BlockType& type, const std::byte* row, int64_t begin, int64_t count,
                   float* values) {
  BlockParts parts;
  int64_t taken_apart = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = (begin + i) / type.elements;
    const int64_t element = (begin + i) % type.elements;
    if (block != taken_apart) {
      type.take_apart(row + block * type.bytes, parts);
      taken_apart = block;
    }
    const int64_t group = element / type.group;
    const float product = parts.scales[group] * static_cast<float>(parts.codes[element]);
    values[i] = type.has_offset ? product - parts.offsets[group] : product;
  }
}

}  // namespace conclave::inline v0::quant
