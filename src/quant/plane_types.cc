#include "quant/plane_types.h"

#include <array>

namespace conclave::inline v0::quant {
namespace {

constexpr std::array kFloatTypes = {DType::kF32, DType::kF16, DType::kBF16};
constexpr std::array kScaleTypes = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E8M0,
                                    DType::kF8E4M3};
constexpr std::array kIndexTypes = {DType::kI32, DType::kI64};

}  // namespace

std::span<const DType> types_of(PlaneType type) {
  switch (type) {
    case PlaneType::kWeights:
      break;
    case PlaneType::kFloat:
      return kFloatTypes;
    case PlaneType::kScale:
      return kScaleTypes;
    case PlaneType::kIndex:
      return kIndexTypes;
  }
  return {};
}

std::string show_types(std::span<const DType> types) {
  std::string text;
  for (const DType type : types) {
    text += (text.empty() ? "" : " or ") + std::string(to_string(type));
  }
  return text;
}

}  // namespace conclave::inline v0::quant
