// The tile registers of AMX in scalar code, exact to the bit: configuration, loads, stores,
// TDPBF16PS and TDPBSUD as in Intel's manual. A fault on a CPU is a failure of the running test
// here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace conclave::testing {

// The layout that ldtilecfg reads.
struct TileConfigBytes {
  uint8_t bytes[64];
};

// One thread's registers; each thread has its own.
class EmulatedTiles {
 public:
  static EmulatedTiles& of_thread();

  void configure(const void* shape);
  void release();
  void zero(int tile);
  void load(int tile, const void* from, int64_t stride);
  void store(int tile, void* to, int64_t stride) const;
  // Computes sums += rows * weights on pairs of bf16.
  void multiply_bf16(int sums, int rows, int weights);
  // The same on fours of bytes, signed in rows and unsigned in weights.
  void multiply_bytes(int sums, int rows, int weights);
  // Rows of sums that products were added to since the thread began.
  int64_t multiplied_rows() const { return multiplied_rows_; }

 private:
  static constexpr int kTiles = 8;
  static constexpr int kRows = 16;
  static constexpr int kRowBytes = 64;
  struct Tile {
    int rows = 0;
    int row_bytes = 0;
    std::byte data[kRows][kRowBytes] = {};
  };

  bool exists(int tile, const char* instruction) const;
  // Whether the tiles exist and their sizes go together.
  bool multiply(const char* instruction, int sums, int rows, int weights) const;
  template <class Sum, class A, class B>
  static void multiply_words(Tile& c, const Tile& a, const Tile& b,
                             Sum (*product)(Sum, const A*, const B*, int64_t));
  Tile tiles_[kTiles];
  mutable int64_t multiplied_rows_ = 0;
};

// Adds the products of the pairs of a row and a column of 32 to `sum`, rounded like one TDPBF16PS:
// even and odd k separately by fused multiply-adds, then their sum, then that plus `sum`. Subnormal
// inputs and results count as zero.
float tile_product(float sum, const uint16_t* row, const uint16_t* column, int64_t pairs);
// Adds the products of a row and a column of bytes to `sum` like one TDPBSUD: sums wrap around.
int32_t byte_tile_product(int32_t sum, const int8_t* row, const uint8_t* column, int64_t fours);

}  // namespace conclave::testing
