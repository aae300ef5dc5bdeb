// Rows of tokens without an expert become zeros, of any width, and nothing else is written.
#include "dispatch/cuda/clear_rows.h"

#include "support/cuda/device_array.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace conclave::dispatch {
namespace {

using testing::DeviceArray;

class DeviceClear : public testing::DeviceTest {
 protected:
  // Every third token has no row. `live` below 0 stands for no counter.
  void check(int64_t tokens, int64_t row_bytes, int64_t stride_bytes, int64_t live) {
    std::vector<int32_t> slot_row(static_cast<size_t>(tokens));
    std::vector<uint8_t> wanted(static_cast<size_t>(tokens * stride_bytes), testing::kPoison);
    for (int64_t t = 0; t < tokens; ++t) {
      const bool missing = t % 3 == 0;
      slot_row[static_cast<size_t>(t)] = missing ? -1 : static_cast<int32_t>(t);
      if (!missing || (live >= 0 && t >= live)) continue;
      const auto begin = wanted.begin() + static_cast<std::ptrdiff_t>(t * stride_bytes);
      std::fill_n(begin, row_bytes, uint8_t{0});
    }
    const DeviceArray<int32_t> rows(slot_row);
    const DeviceArray<int64_t> counter(std::vector<int64_t>{live});
    const DeviceArray<uint8_t> out(wanted.size());
    clear_rows({.slot_row = rows.data(),
                .num_tokens = tokens,
                .live_tokens = live < 0 ? nullptr : counter.data(),
                .row_bytes = row_bytes,
                .out = out.data(),
                .out_stride_bytes = stride_bytes},
               stream());
    wait();
    out.expect_guard_untouched();
    EXPECT_EQ(out.download(), wanted) << tokens << " rows of " << row_bytes << " bytes, "
                                      << stride_bytes << " apart, " << live << " live";
  }
};

// Rows of 22 bytes that begin at multiples of 16 end inside a store of 16 bytes.
TEST_F(DeviceClear, RowsOfAnyWidth_BecomeZerosToTheirEnd) {
  for (const auto& [row_bytes, stride_bytes] : std::vector<std::pair<int64_t, int64_t>>{
           {2, 2}, {16, 16}, {22, 32}, {30, 30}, {32, 48}, {270, 272}, {4096, 4096}}) {
    for (const int64_t tokens : {1, 31, 33, 300}) check(tokens, row_bytes, stride_bytes, -1);
  }
}

TEST_F(DeviceClear, TokensBehindTheLiveOnes_StayAsTheyAre) {
  for (const int64_t live : {0, 1, 4, 40, 257, 300, 400}) check(300, 64, 64, live);
}

TEST_F(DeviceClear, NoTokens_IsAnOrdinaryCall) { check(0, 64, 64, -1); }

}  // namespace
}  // namespace conclave::dispatch
