#include "checkpoint/methods/shared_planes.h"

#include "core/checked.h"
#include "core/code_bits.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace conclave::inline v0::checkpoint {

StoredShapes codes_as_read(const MatrixForm& form) { return {{form.rows, form.cols}}; }

StoredShapes scales_as_read(const MatrixForm& form) { return {{form.scale_rows, form.groups}}; }

StoredShapes columns(const MatrixForm& form) { return {{form.cols}}; }

StoredShapes single(const MatrixForm&) { return {{1}, {}, {1, 1}}; }

StoredShapes pair_shapes(const MatrixForm& form) { return {{form.rows, ceil_div(form.cols, 2)}}; }

bool fills_pairs(const MatrixForm& form) { return form.cols % 2 == 0; }

void decode_pairs_of(const MatrixForm& form, int64_t row_bytes, std::span<const std::byte> stored,
                     std::span<std::byte> plane) {
  for (int64_t row = 0; row < form.rows; ++row) {
    const std::byte* const line = stored.data() + row * row_bytes;
    for (int64_t col = 0; col < form.cols; ++col) {
      set_code(plane.data(), row * form.cols + col, 4, code_at(line, col, 4));
    }
  }
}

void decode_pairs(const MatrixForm& form, std::span<const PlaneInput> inputs,
                  std::span<std::byte> plane) {
  decode_pairs_of(form, ceil_div(form.cols, 2), inputs[0].bytes, plane);
}

bool has_pairs(const TensorInfo& tensor) {
  return std::ranges::find(kPairTypes, tensor.dtype) != kPairTypes.end();
}

void decode_divisor(const MatrixForm&, std::span<const PlaneInput> inputs,
                    std::span<std::byte> plane) {
  const float divisor = float_at(inputs[0], 0);
  if (!std::isfinite(divisor) || divisor <= 0) {
    throw Error(ErrorCode::kTensorValue, {.what = "scales cannot be divided by this",
                                          .file = std::string(inputs[0].file),
                                          .tensor = inputs[0].info->name,
                                          .expected = "finite and positive",
                                          .found = fmt::format("{}", divisor)});
  }
  set_float(plane, 0, 1.0F / divisor);
}

void encode_divisor(const MatrixForm&, const MatrixPlanes& planes, std::span<std::byte> tensor) {
  set_float(tensor, 0, 1.0F / planes.matrix_scale);
}

}  // namespace conclave::inline v0::checkpoint
