// Token rows are copied to the places of the grouping; a loop on the host gives the expected rows.
#include "dispatch/cuda/spread_rows.h"

#include "core/float_convert.h"
#include "support/cuda/device_array.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace conclave::dispatch {
namespace {

using testing::DeviceArray;

constexpr uint16_t kPoison16 = testing::kPoison * 0x101;

uint16_t bits_of(float value, DType dtype) {
  return dtype == DType::kF16 ? float_to_f16(value) : float_to_bf16(value);
}

struct SpreadProblem {
  DType from = DType::kBF16;
  DType to = DType::kBF16;
  int64_t tokens = 1;
  int32_t top_k = 1;
  int64_t columns = 8;
  int64_t stride = 8;      // elements of `from`
  int64_t out_stride = 8;  // elements of `to`
  int64_t live = -1;       // -1: no counter

  std::string describe() const {
    return std::to_string(static_cast<int>(from)) + " to " + std::to_string(static_cast<int>(to)) +
           ", T " + std::to_string(tokens) + ", k " + std::to_string(top_k) + ", " +
           std::to_string(columns) + " of " + std::to_string(stride) + " columns, live " +
           std::to_string(live);
  }
};

// A permutation of the slots in which every fifth has no row.
std::vector<int32_t> random_rows(int64_t slots) {
  std::vector<int32_t> rows(static_cast<size_t>(slots));
  std::iota(rows.begin(), rows.end(), 0);
  std::mt19937 generator(7);
  std::shuffle(rows.begin(), rows.end(), generator);
  for (size_t slot = 0; slot < rows.size(); slot += 5) rows[slot] = -1;
  return rows;
}

std::vector<float> random_values(int64_t count) {
  std::mt19937 generator(11);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  if (values.size() > 3) values[3] = std::numeric_limits<float>::infinity();
  return values;
}

class DeviceSpread : public testing::DeviceTest {
 protected:
  void check(const SpreadProblem& problem) {
    const std::vector<float> values = random_values(problem.tokens * problem.stride);
    std::vector<uint16_t> halves;
    for (const float value : values) halves.push_back(bits_of(value, problem.from));
    const DeviceArray<float> wide(values);
    const DeviceArray<uint16_t> narrow(halves);
    const std::vector<int32_t> rows = random_rows(problem.tokens * problem.top_k);
    const DeviceArray<int32_t> slot_row(rows);
    const DeviceArray<int64_t> live(std::vector<int64_t>{problem.live});
    const DeviceArray<uint16_t> out(
        static_cast<size_t>(problem.tokens * problem.top_k * problem.out_stride));
    const bool is_wide = problem.from == DType::kF32;
    const void* data = is_wide ? static_cast<const void*>(wide.data()) : narrow.data();
    spread_rows({.rows = data,
                 .dtype = problem.from,
                 .row_stride = problem.stride,
                 .num_rows = problem.tokens,
                 .live_rows = problem.live < 0 ? nullptr : live.data(),
                 .columns = problem.columns,
                 .slot_row = slot_row.data(),
                 .top_k = problem.top_k,
                 .out = out.data(),
                 .out_dtype = problem.to,
                 .out_stride = problem.out_stride},
                stream());
    wait();
    out.expect_guard_untouched();
    ASSERT_EQ(out.download(), expected(problem, values, rows)) << problem.describe();
  }

  static std::vector<uint16_t> expected(const SpreadProblem& problem,
                                        const std::vector<float>& values,
                                        const std::vector<int32_t>& rows) {
    std::vector<uint16_t> out(
        static_cast<size_t>(problem.tokens * problem.top_k * problem.out_stride), kPoison16);
    const int64_t live = problem.live < 0 ? problem.tokens : problem.live;
    for (int64_t slot = 0; slot < live * problem.top_k; ++slot) {
      const int64_t row = rows[static_cast<size_t>(slot)];
      if (row < 0) continue;
      for (int64_t c = 0; c < problem.columns; ++c) {
        const int64_t from = slot / problem.top_k * problem.stride + c;
        float value = values[static_cast<size_t>(from)];
        if (problem.from == DType::kF16) value = f16_to_float(bits_of(value, DType::kF16));
        if (problem.from == DType::kBF16) value = bf16_to_float(bits_of(value, DType::kBF16));
        out[static_cast<size_t>(row * problem.out_stride + c)] = bits_of(value, problem.to);
      }
    }
    return out;
  }
};

TEST_F(DeviceSpread, EachType_RoundsOnceToEverySlot) {
  for (const DType from : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType to : {DType::kBF16, DType::kF16}) {
      check({.from = from,
             .to = to,
             .tokens = 37,
             .top_k = 3,
             .columns = 264,
             .stride = 264,
             .out_stride = 272});
    }
  }
}

TEST_F(DeviceSpread, EachWidth_WritesItsColumnsOnly) {
  for (const int64_t columns : {1, 7, 8, 9, 255, 1023, 1024, 1025, 2880, 7168}) {
    const int64_t padded = (columns + 7) / 8 * 8;
    check({.tokens = 5, .top_k = 2, .columns = columns, .stride = padded, .out_stride = padded});
  }
}

// Rows of the caller that do not begin at multiples of 16 bytes are read one element at a time.
TEST_F(DeviceSpread, RowsThatAreNotAligned_AreReadAllTheSame) {
  for (const DType from : {DType::kF32, DType::kBF16}) {
    check(
        {.from = from, .tokens = 9, .top_k = 2, .columns = 129, .stride = 131, .out_stride = 136});
  }
}

TEST_F(DeviceSpread, EachNumberOfChoices_FillsAllRows) {
  for (const int32_t top_k : {1, 2, 5, 31, 32, 33, 70}) {
    check({.tokens = 6, .top_k = top_k, .columns = 64, .stride = 64, .out_stride = 64});
  }
}

TEST_F(DeviceSpread, FewerLiveTokens_LeaveTheRestAlone) {
  for (const int64_t live : {0, 1, 10, 11}) {
    check({.tokens = 11, .top_k = 2, .columns = 72, .stride = 72, .out_stride = 72, .live = live});
  }
}

TEST_F(DeviceSpread, NoTokens_LaunchNothing) {
  spread_rows({.columns = 8, .top_k = 2, .out_stride = 8}, stream());
  wait();
}

TEST_F(DeviceSpread, RowsOfOutThatAreNotAligned_AreATypedError) {
  EXPECT_THROW(spread_rows({.num_rows = 1, .columns = 8, .top_k = 1, .out_stride = 9}, stream()),
               Error);
}

}  // namespace
}  // namespace conclave::dispatch
