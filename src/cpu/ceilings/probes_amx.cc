#include "cpu/ceilings/probe_functions.h"

#include <immintrin.h>

namespace conclave::inline v0::cpu::ceilings {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kAccumulatorTiles = 6;

// The memory layout that ldtilecfg reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

struct Bf16Product {
  static void add_six() {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
};

struct ByteProduct {
  static void add_six() {
    _tile_dpbsud(0, 6, 7);
    _tile_dpbsud(1, 6, 7);
    _tile_dpbsud(2, 6, 7);
    _tile_dpbsud(3, 6, 7);
    _tile_dpbsud(4, 6, 7);
    _tile_dpbsud(5, 6, 7);
  }
};

template <class Product>
float tile_products(int64_t iterations) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = kTileRows;
    config.row_bytes[tile] = kTileRowBytes;
  }
  _tile_loadconfig(&config);
  alignas(64) float result[kTileRows * kTileRowBytes / sizeof(float)] = {};
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  // Six accumulators cover the latency of one product at the rate of one every 16 cycles.
  for (int64_t i = 0; i < iterations; ++i) {
    Product::add_six();
  }
  _tile_stored(0, result, kTileRowBytes);
  _tile_release();
  return result[0];
}

}  // namespace

// Each product computes 16 x 16 sums over 32 products, or 64 of bytes.
constinit const RateLoop kAmxBf16{
    .run = tile_products<Bf16Product>,
    .flops_per_iteration = int64_t{2} * 16 * 16 * 32 * kAccumulatorTiles};
constinit const RateLoop kInt8DotAmx{
    .run = tile_products<ByteProduct>,
    .flops_per_iteration = int64_t{2} * 16 * 16 * 64 * kAccumulatorTiles};

}  // namespace conclave::inline v0::cpu::ceilings
