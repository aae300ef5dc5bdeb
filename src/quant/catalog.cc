#include "quant/bf16/bf16.h"
#include "quant/f16/f16.h"
#include "quant/f32/f32.h"
#include "quant/plain_codec.h"
#include "quant/weight_format.h"

#include <array>

namespace conclave::inline v0::quant {
namespace {

constexpr std::array kFormats = {
    plain_row<Bf16Codec>("bf16", DType::kBF16),
    plain_row<F16Codec>("f16", DType::kF16),
    plain_row<F32Codec>("f32", DType::kF32),
};

}  // namespace

Catalog<WeightFormat> format_catalog() { return Catalog<WeightFormat>(kFormats); }

}  // namespace conclave::inline v0::quant
