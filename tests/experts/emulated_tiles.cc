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

int32_t byte_tile_product(int32_t sum, const int8_t* row, const uint8_t* column, int64_t fours) {
  auto bits = static_cast<uint32_t>(sum);
  for (int64_t k = 0; k < 4 * fours; ++k) bits += static_cast<uint32_t>(row[k] * column[k]);
  return static_cast<int32_t>(bits);
}

// Adds the product of each row and each column, whose words of 32 bits lie in a tile's column.
template <class Sum, class A, class B>
void EmulatedTiles::multiply_words(Tile& c, const Tile& a, const Tile& b,
                                   Sum (*product)(Sum, const A*, const B*, int64_t)) {
  const int words = a.row_bytes / 4;
  for (int m = 0; m < c.rows; ++m) {
    A row[kRowBytes / sizeof(A)];
    std::memcpy(row, a.data[m], sizeof(row));
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      B column[kRowBytes / sizeof(B)];
      for (int k = 0; k < words; ++k) {
        std::memcpy(reinterpret_cast<std::byte*>(column) + 4 * k, b.data[k] + 4 * n, 4);
      }
      Sum sum;
      std::memcpy(&sum, c.data[m] + 4 * n, sizeof(sum));
      sum = product(sum, row, column, words);
      std::memcpy(c.data[m] + 4 * n, &sum, sizeof(sum));
    }
  }
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

bool EmulatedTiles::multiply(const char* instruction, int sums, int rows, int weights) const {
  if (!exists(sums, instruction) || !exists(rows, instruction) || !exists(weights, instruction)) {
    return false;
  }
  EXPECT_NE(sums, rows);
  EXPECT_NE(sums, weights);
  EXPECT_NE(rows, weights);
  const Tile& c = tiles_[sums];
  const Tile& a = tiles_[rows];
  const Tile& b = tiles_[weights];
  EXPECT_EQ(c.rows, a.rows) << instruction << ": rows of sums and of the first operand";
  EXPECT_EQ(a.row_bytes / 4, b.rows) << instruction << ": words of k";
  EXPECT_EQ(c.row_bytes, b.row_bytes) << instruction << ": columns";
  multiplied_rows_ += c.rows;
  return true;
}

void EmulatedTiles::multiply_bf16(int sums, int rows, int weights) {
  if (!multiply("tdpbf16ps", sums, rows, weights)) return;
  multiply_words<float, uint16_t, uint16_t>(tiles_[sums], tiles_[rows], tiles_[weights],
                                            tile_product);
}

void EmulatedTiles::multiply_bytes(int sums, int rows, int weights) {
  if (!multiply("tdpbsud", sums, rows, weights)) return;
  multiply_words<int32_t, int8_t, uint8_t>(tiles_[sums], tiles_[rows], tiles_[weights],
                                           byte_tile_product);
}

}  // namespace conclave::testing
