#include "experts/quantize_rows.h"

#include "core/float_convert.h"
#include "support/executors.h"
#include "support/guarded.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace conclave::testing {
namespace {

// Ordinary values, ties, both zeros, subnormals, limits, infinities and NaNs.
const std::vector<float> kValues = {0.0F,
                                    -0.0F,
                                    1.0F,
                                    -1.0F,
                                    1.00390625F,
                                    1.01171875F,
                                    3.14159265F,
                                    -2.71828F,
                                    65504.0F,
                                    65520.0F,
                                    1e-40F,
                                    -1e-44F,
                                    3.3895314e38F,
                                    3.4e38F,
                                    -3.4e38F,
                                    std::numeric_limits<float>::infinity(),
                                    -std::numeric_limits<float>::infinity(),
                                    std::numeric_limits<float>::quiet_NaN(),
                                    std::numeric_limits<float>::signaling_NaN(),
                                    1e-8F,
                                    6.1e-5F};

uint16_t encode(DType dtype, float value) {
  return dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
}
float decode(DType dtype, uint16_t bits) {
  return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Three rows with a stride larger than their width, at the end of a page.
struct Source {
  static constexpr int64_t kRows = 3;
  DType dtype;
  int64_t columns = static_cast<int64_t>(kValues.size());
  int64_t stride = columns + 5;
  GuardedBuffer bytes;

  explicit Source(DType type)
      : dtype(type),
        bytes(static_cast<size_t>(((kRows - 1) * stride + columns) * byte_size(type)),
              GuardSide::kEnd, 0xff) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        std::byte* at = bytes.data() + (r * stride + c) * byte_size(dtype);
        const float value = source_value(r, c);
        if (dtype == DType::kF32) {
          std::memcpy(at, &value, sizeof(value));
        } else {
          const uint16_t bits = encode(dtype, value);
          std::memcpy(at, &bits, sizeof(bits));
        }
      }
    }
  }
  float source_value(int64_t row, int64_t column) const {
    return kValues[static_cast<size_t>((column + row) % columns)];
  }
  // Returns the value of the stored element.
  float stored_value(int64_t row, int64_t column) const {
    const float value = source_value(row, column);
    return dtype == DType::kF32 ? value : decode(dtype, encode(dtype, value));
  }
  ConstTensorView view() const { return {bytes.data(), dtype, Shape{kRows, columns}, stride}; }
};

bool equal(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof(a)) == 0;
}

TEST(QuantizeRows, EveryTypeToF32_ExactAndPadded) {
  SerialExecutor executor(2);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Source source(dtype);
    const int64_t row_bytes = 192;
    const GuardedBuffer out(static_cast<size_t>(Source::kRows * row_bytes), GuardSide::kEnd, 0xff);
    const RowBundle bundle =
        experts::quantize_rows(source.view(), DType::kF32, row_bytes, out.data(), executor);
    EXPECT_EQ(bundle.num_rows, Source::kRows);
    EXPECT_EQ(bundle.dtype, DType::kF32);
    for (int64_t r = 0; r < Source::kRows; ++r) {
      const float* row = out.as<float>() + r * row_bytes / 4;
      for (int64_t c = 0; c < row_bytes / 4; ++c) {
        const float expected = c < source.columns ? source.stored_value(r, c) : 0.0F;
        EXPECT_TRUE(equal(row[c], expected)) << to_string(dtype) << " " << r << "," << c;
      }
    }
  }
}

TEST(QuantizeRows, EveryTypeToBf16_NearestEvenAndPadded) {
  SerialExecutor executor(2);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Source source(dtype);
    const int64_t row_bytes = 128;
    const GuardedBuffer out(static_cast<size_t>(Source::kRows * row_bytes), GuardSide::kBegin,
                            0xff);
    experts::quantize_rows(source.view(), DType::kBF16, row_bytes, out.data(), executor);
    for (int64_t r = 0; r < Source::kRows; ++r) {
      const uint16_t* row = out.as<uint16_t>() + r * row_bytes / 2;
      for (int64_t c = 0; c < row_bytes / 2; ++c) {
        const uint16_t expected =
            c < source.columns ? float_to_bf16(source.stored_value(r, c)) : uint16_t{0};
        EXPECT_TRUE(equal(bf16_to_float(row[c]), bf16_to_float(expected)))
            << to_string(dtype) << " " << r << "," << c;
      }
    }
  }
}

TEST(QuantizeRows, NoRows_WritesNothing) {
  SerialExecutor executor(2);
  const RowBundle bundle = experts::quantize_rows({nullptr, DType::kF32, Shape{0, 8}, 0},
                                                  DType::kF32, 64, nullptr, executor);
  EXPECT_EQ(bundle.num_rows, 0);
}

}  // namespace
}  // namespace conclave::testing
