#include "quant/weight_format.h"

#include "core/checked.h"

#include <string>

namespace conclave::inline v0::quant {

const WeightFormat& plain_format(DType element) {
  std::string known;
  for (const WeightFormat& format : format_catalog().rows()) {
    if (format.group != GroupShape{}) continue;
    if (format.element == element) return format;
    known += (known.empty() ? "" : ", ") + std::string(to_string(format.element));
  }
  throw Error(ErrorCode::kDType,
              ErrorDetail{.what = "weights of this element type need scales or are not supported",
                          .expected = "one of " + known,
                          .found = std::string(to_string(element))});
}

size_t row_bytes(const WeightFormat& format, int64_t cols) {
  const auto bits = checked_mul<int64_t>(cols, bit_size(format.element));
  if (cols < 0 || !bits) {
    throw Error(ErrorCode::kSizeOverflow,
                ErrorDetail{.what = "the bytes of a row of weights do not fit 64 bits",
                            .found = std::to_string(cols) + " columns of " +
                                     std::string(to_string(format.element))});
  }
  if (*bits % 8 != 0) {
    throw Error(ErrorCode::kShape, ErrorDetail{.what = "a row of weights does not fill whole bytes",
                                               .found = std::to_string(cols) + " columns of " +
                                                        std::string(to_string(format.element))});
  }
  return static_cast<size_t>(*bits / 8);
}

}  // namespace conclave::inline v0::quant
