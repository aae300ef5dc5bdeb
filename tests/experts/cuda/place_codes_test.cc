// Codes that were made elsewhere get to their places, and to their values, as if they had been made
// there: bit for bit, with nothing written beside them.
#include "experts/cuda/common/place_codes.h"

#include "core/checked.h"
#include "experts/cuda/common/quantize_rows.h"
#include "experts/cuda/common/round_rows.h"
#include "quant/gpu_rows.h"
#include "support/cuda/device_array.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::testing {
namespace {

constexpr int64_t kRows = 37;
constexpr int32_t kTopK = 3;
constexpr int64_t kGroup = 128;

struct Form {
  DType weights = DType::kF8E4M3;
  QuantSpec quant;

  DType codes() const { return weights; }  // rows beside weights of a byte have their type
  bool grouped() const { return quant.activations == ActivationScale::kGroup; }
  int64_t scales(int64_t columns) const { return grouped() ? ceil_div(columns, kGroup) : 1; }
};

std::vector<Form> forms() {
  return {{DType::kF8E4M3, {.activations = ActivationScale::kGroup}},
          {DType::kF8E4M3, {.activations = ActivationScale::kGroup, .power_of_two_scales = true}},
          {DType::kF8E4M3, {.activations = ActivationScale::kToken}},
          {DType::kI8, {.activations = ActivationScale::kToken}}};
}

std::vector<float> make_values(int64_t columns) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(kRows * columns));
  for (int64_t r = 0; r < kRows; ++r) {
    const float size = r % 5 == 1 ? 0.0F : std::pow(10.0F, static_cast<float>(r % 11) - 5.0F);
    for (int64_t i = 0; i < columns; ++i) {
      values[static_cast<size_t>(r * columns + i)] = normal(random) * size;
    }
    auto& some = values[static_cast<size_t>(r * columns + r % columns)];
    if (r % 7 == 2) some = std::numeric_limits<float>::quiet_NaN();
    if (r % 7 == 4) some = std::numeric_limits<float>::infinity();
  }
  return values;
}

// Rows in blocks, as they travel: codes, then scales, then bytes of others.
struct Blocks {
  int64_t scales = 0;
  int64_t bytes = 0;
};
Blocks blocks_of(const Form& form, int64_t columns) {
  const int64_t scales = round_up(columns, int64_t{16});
  return {scales, round_up(scales + 4 * form.scales(columns) + 20, int64_t{16})};
}

class PlaceCodes : public DeviceTest {
 protected:
  // The same codes, made where they belong.
  void make(const Form& form, const DeviceArray<float>& rows, int64_t columns,
            experts::QuantizeRowsCuda to) {
    to.rows = rows.data();
    to.dtype = DType::kF32;
    to.num_rows = kRows;
    to.columns = columns;
    to.row_stride = columns;
    to.activations = form.quant.activations;
    to.power_of_two = form.quant.power_of_two_scales;
    to.code_dtype = form.codes();
    experts::quantize_rows_cuda(to, stream());
  }
  experts::CodedRows travelled(const Form& form, DeviceArray<uint8_t>& blocks, int64_t columns) {
    const Blocks layout = blocks_of(form, columns);
    return {.codes = blocks.data(),
            .dtype = form.codes(),
            .num_rows = kRows,
            .columns = columns,
            .code_stride = layout.bytes,
            .scales = reinterpret_cast<const float*>(blocks.data() + layout.scales),
            .scale_stride = layout.bytes / 4,
            .columns_of_group = form.grouped() ? kGroup : columns};
  }
  void pack(const Form& form, const DeviceArray<float>& rows, DeviceArray<uint8_t>& blocks,
            int64_t columns) {
    const Blocks layout = blocks_of(form, columns);
    make(form, rows, columns,
         {.codes = blocks.data(),
          .code_stride = layout.bytes,
          .scales = reinterpret_cast<float*>(blocks.data() + layout.scales),
          .scale_stride = layout.bytes / 4});
  }
  void check_places(const Form& form, int64_t columns, const std::vector<int32_t>& slots);
  void check_values(const Form& form, int64_t columns);
};

void PlaceCodes::check_places(const Form& form, int64_t columns,
                              const std::vector<int32_t>& slots) {
  const int64_t targets = slots.empty() ? kRows : kRows * kTopK;
  const int64_t stride = round_up(columns, int64_t{16});
  const int64_t groups = form.scales(columns);
  const DeviceArray<float> rows(make_values(columns));
  const DeviceArray<int32_t> slot_row(slots.empty() ? std::vector<int32_t>{0} : slots);
  const int32_t* const places = slots.empty() ? nullptr : slot_row.data();
  const int32_t copies = slots.empty() ? 1 : kTopK;
  // Scales of a group side by side, as kernels of sorted rows take them.
  const int64_t group_stride = round_up(targets, int64_t{4});
  DeviceArray<uint8_t> expected(static_cast<size_t>(targets * stride));
  DeviceArray<float> expected_scales(static_cast<size_t>(groups * group_stride));
  make(form, rows, columns,
       {.codes = expected.data(),
        .code_stride = stride,
        .scales = expected_scales.data(),
        .scale_stride = 1,
        .group_stride = group_stride,
        .slot_row = places,
        .top_k = copies});
  DeviceArray<uint8_t> blocks(static_cast<size_t>(kRows * blocks_of(form, columns).bytes));
  pack(form, rows, blocks, columns);
  DeviceArray<uint8_t> codes(static_cast<size_t>(targets * stride));
  DeviceArray<float> scales(static_cast<size_t>(groups * group_stride));
  experts::place_codes({.rows = travelled(form, blocks, columns),
                        .codes = codes.data(),
                        .code_stride = stride,
                        .scales = scales.data(),
                        .scale_stride = 1,
                        .group_stride = group_stride,
                        .slot_row = places,
                        .top_k = copies},
                       stream());
  wait();
  codes.expect_guard_untouched();
  scales.expect_guard_untouched();
  EXPECT_EQ(codes.download(), expected.download());
  const std::vector<float> found = scales.download();
  const std::vector<float> wanted = expected_scales.download();
  EXPECT_EQ(std::memcmp(found.data(), wanted.data(), found.size() * sizeof(float)), 0);
}

void PlaceCodes::check_values(const Form& form, int64_t columns) {
  if (!quant::value_rows_support(form.weights, form.quant)) return;
  const int64_t stride = round_up(columns, int64_t{8});
  const bool has_factors = quant::row_factor(form.quant) == quant::RowFactor::kOfRow;
  const DeviceArray<float> rows(make_values(columns));
  DeviceArray<uint16_t> expected(static_cast<size_t>(kRows * stride));
  DeviceArray<float> expected_factors(static_cast<size_t>(kRows));
  experts::round_rows_cuda({.rows = rows.data(),
                            .dtype = DType::kF32,
                            .num_rows = kRows,
                            .columns = columns,
                            .row_stride = columns,
                            .rule = experts::row_rounding(form.weights, form.quant),
                            .values = expected.data(),
                            .value_stride = stride,
                            .factors = has_factors ? expected_factors.data() : nullptr},
                           stream());
  DeviceArray<uint8_t> blocks(static_cast<size_t>(kRows * blocks_of(form, columns).bytes));
  pack(form, rows, blocks, columns);
  DeviceArray<uint16_t> values(static_cast<size_t>(kRows * stride));
  DeviceArray<float> factors(static_cast<size_t>(kRows));
  experts::code_row_values({.rows = travelled(form, blocks, columns),
                            .values = values.data(),
                            .value_stride = stride,
                            .factors = has_factors ? factors.data() : nullptr},
                           stream());
  wait();
  values.expect_guard_untouched();
  const std::vector<uint16_t> found = values.download();
  const std::vector<uint16_t> wanted = expected.download();
  const std::vector<float> own = factors.download();
  const std::vector<float> others = expected_factors.download();
  for (int64_t r = 0; r < kRows; ++r) {
    // A row that is not finite is NaN in one of both places.
    if (r % 7 == 2 || r % 7 == 4) continue;
    for (int64_t i = 0; i < stride; ++i) {
      const auto at = static_cast<size_t>(r * stride + i);
      // A code of an integer has one zero, a rounded value two: sums that begin with zero agree.
      if (form.codes() == DType::kI8 && ((found[at] | wanted[at]) & 0x7fff) == 0) continue;
      ASSERT_EQ(found[at], wanted[at]) << "row " << r << " column " << i << " of " << columns;
    }
    if (has_factors) {
      EXPECT_EQ(own[static_cast<size_t>(r)], others[static_cast<size_t>(r)]) << r;
    }
  }
}

TEST_F(PlaceCodes, RowsGetWhereTheyWouldHaveBeenMade) {
  std::mt19937 random(3);
  std::vector<int32_t> slots(static_cast<size_t>(kRows * kTopK));
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  std::shuffle(slots.begin(), slots.end(), random);
  for (size_t i = 0; i < slots.size(); i += 4) slots[i] = -1;
  for (const Form& form : forms()) {
    for (const int64_t columns : {16, 40, 127, 128, 129, 520, 1024, 1025, 2049, 7168}) {
      SCOPED_TRACE("columns " + std::to_string(columns));
      check_places(form, columns, {});
      check_places(form, columns, slots);
    }
  }
}

TEST_F(PlaceCodes, ValuesAreThoseOfTheRowsThemselves) {
  for (const Form& form : forms()) {
    for (const int64_t columns : {16, 40, 128, 136, 520, 1024, 2056, 7168}) {
      check_values(form, columns);
    }
  }
}

TEST_F(PlaceCodes, NoRows_AreNoLaunch) {
  experts::place_codes({}, stream());
  experts::code_row_values({}, stream());
  wait();
}

}  // namespace
}  // namespace conclave::testing
