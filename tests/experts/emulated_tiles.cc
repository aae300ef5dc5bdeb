#include "experts/emulated_tiles.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

namespace conclave::testing {
namespace {

constexpr uint32_t kSign = 0x80000000U;
constexpr uint32_t kSmallestNormal = 0x00800000U;

float without_subnormal(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return (bits & ~kSign) < kSmallestNormal ? std::bit_cast<float>(bits & kSign) : value;
}

float widened(uint16_t bits) {
  return without_subnormal(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
}

float add(float a, float b) {
  return without_subnormal(without_subnormal(a) + without_subnormal(b));
}

float multiply_add(uint16_t a, uint16_t b, float sum) {
  return without_subnormal(std::fma(widened(a), widened(b), sum));
}

}  // namespace

float tile_product(float sum, const uint16_t* row, const uint16_t* column, int64_t pairs) {
  float even = 0;
  float odd = 0;
  for (int64_t k = 0; k < pairs; ++k) {
    even = multiply_add(row[2 * k], column[2 * k], even);
    odd = multiply_add(row[2 * k + 1], column[2 * k + 1], odd);
  }
  return add(sum, add(even, odd));
}

EmulatedTiles& EmulatedTiles::of_thread() {
  thread_local EmulatedTiles tiles;
  return tiles;
}

bool EmulatedTiles::exists(int tile, const char* instruction) const {
  const bool configured = tile >= 0 && tile < kTiles && tiles_[tile].rows != 0;
  EXPECT_TRUE(configured) << instruction << " of tile " << tile << ", which is not configured";
  return configured;
}

void EmulatedTiles::configure(const void* shape) {
  uint8_t bytes[64];
  std::memcpy(bytes, shape, sizeof(bytes));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(shape) % 64, 0U) << "a tile configuration out of line";
  EXPECT_EQ(bytes[0], 1) << "palette";
  EXPECT_EQ(bytes[1], 0) << "start_row";
  for (int i = 2; i < 16; ++i) EXPECT_EQ(bytes[i], 0) << "reserved byte " << i;
  for (int t = 0; t < 16; ++t) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * t, sizeof(row_bytes));
    const int rows = bytes[48 + t];
    if (t >= kTiles) {
      EXPECT_EQ(row_bytes + rows, 0) << "tile " << t << " does not exist";
      continue;
    }
    EXPECT_LE(row_bytes, kRowBytes) << "tile " << t;
    EXPECT_LE(rows, kRows) << "tile " << t;
    EXPECT_EQ(rows == 0, row_bytes == 0) << "tile " << t;
    tiles_[t] = Tile{.rows = rows, .row_bytes = row_bytes};
  }
}

void EmulatedTiles::release() {
  for (Tile& tile : tiles_) tile = Tile{};
}

void EmulatedTiles::zero(int tile) {
  if (exists(tile, "tilezero")) std::memset(tiles_[tile].data, 0, sizeof(tiles_[tile].data));
}

void EmulatedTiles::load(int tile, const void* from, int64_t stride) {
  if (!exists(tile, "tileloadd")) return;
  Tile& target = tiles_[tile];
  std::memset(target.data, 0, sizeof(target.data));
  const auto* row = static_cast<const std::byte*>(from);
  for (int r = 0; r < target.rows; ++r, row += stride) {
    std::memcpy(target.data[r], row, static_cast<size_t>(target.row_bytes));
  }
}

void EmulatedTiles::store(int tile, void* to, int64_t stride) const {
  if (!exists(tile, "tilestored")) return;
  const Tile& source = tiles_[tile];
  auto* row = static_cast<std::byte*>(to);
  for (int r = 0; r < source.rows; ++r, row += stride) {
    std::memcpy(row, source.data[r], static_cast<size_t>(source.row_bytes));
  }
}

void EmulatedTiles::multiply_bf16(int sums, int rows, int weights) {
  constexpr const char* kName = "tdpbf16ps";
  if (!exists(sums, kName) || !exists(rows, kName) || !exists(weights, kName)) return;
  Tile& c = tiles_[sums];
  const Tile& a = tiles_[rows];
  const Tile& b = tiles_[weights];
  EXPECT_NE(sums, rows);
  EXPECT_NE(sums, weights);
  EXPECT_NE(rows, weights);
  EXPECT_EQ(c.rows, a.rows) << kName << ": rows of sums and of the first operand";
  EXPECT_EQ(a.row_bytes / 4, b.rows) << kName << ": pairs of k";
  EXPECT_EQ(c.row_bytes, b.row_bytes) << kName << ": columns";
  const int pairs = a.row_bytes / 4;
  for (int m = 0; m < c.rows; ++m) {
    uint16_t row[kRowBytes / 2];
    std::memcpy(row, a.data[m], sizeof(row));
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      uint16_t column[kRowBytes / 2];
      for (int k = 0; k < pairs; ++k) std::memcpy(column + 2 * k, b.data[k] + 4 * n, 4);
      float sum;
      std::memcpy(&sum, c.data[m] + 4 * n, sizeof(sum));
      sum = tile_product(sum, row, column, pairs);
      std::memcpy(c.data[m] + 4 * n, &sum, sizeof(sum));
    }
  }
}

}  // namespace conclave::testing
