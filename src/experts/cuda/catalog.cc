// The GPU's expert kernels in order of preference at equal tokens; the reference, which supports
// everything, is last.
#include "experts/cuda/catalog.h"

#include "experts/cuda/reference/reference.h"
#include "experts/cuda/sm90/decode/call.h"
#include "experts/cuda/sm90/stream/stream.h"
#include "experts/cuda/sm90/stream/stream_fp8.h"
#include "experts/cuda/sm90/tile/tile.h"
#include "experts/cuda/sm90/tile_fp8/tile_fp8.h"

#include <array>

namespace conclave::inline v0::experts {
namespace {

// The shares were measured on an H200, whose rates they are shares of.
constexpr const cuda::DeviceRates& kMeasured = cuda::kH200Rates;
constexpr double share16(double teraflops) { return teraflops / kMeasured.tensor16_teraflops; }
constexpr double share8(double teraflops) { return teraflops / kMeasured.tensor8_teraflops; }
constexpr double share_of_memory(double terabytes) {
  return terabytes / kMeasured.memory_terabytes;
}

constexpr std::array kRows = {
    DeviceKernelRow{.name = "cuda.decode_sm90",
                    .supports = decode_supports,
                    .tiles = decode_tiles,
                    .make = nullptr,
                    .one_launch = decode_reach,
                    .make_one_launch = make_decode},
    DeviceKernelRow{.name = "cuda.stream_sm90",
                    .supports = stream_sm90_supports,
                    .tiles = stream_sm90_tiles,
                    .make = make_stream_sm90,
                    .arithmetic = "wgmma",
                    .product_share = share16(350),
                    .memory_share = share_of_memory(4.5),
                    .sorted_product_share = share16(680),
                    .sorted_memory_share = share_of_memory(4.0),
                    .sorted_row_step = 8,
                    .sorted_end_depth = 384},
    DeviceKernelRow{.name = "cuda.stream_fp8_sm90",
                    .supports = stream_fp8_supports,
                    .tiles = stream_fp8_tiles,
                    .make = make_stream_fp8,
                    .arithmetic = "wgmma_e4m3",
                    .products = &cuda::DeviceRates::tensor8_teraflops,
                    .product_share = share8(350),
                    .memory_share = share_of_memory(4.3)},
    DeviceKernelRow{.name = "cuda.tile_sm90",
                    .supports = tile_sm90_supports,
                    .tiles = tile_sm90_tiles,
                    .make = make_tile_sm90,
                    .arithmetic = "wgmma",
                    .product_share = share16(620),
                    .memory_share = share_of_memory(4.0),
                    .row_step = 64,
                    .adds_rows = true},
    DeviceKernelRow{.name = "cuda.tile_fp8_sm90",
                    .supports = tile_fp8_supports,
                    .tiles = tile_fp8_tiles,
                    .make = make_tile_fp8,
                    .arithmetic = "wgmma_e4m3",
                    .products = &cuda::DeviceRates::tensor8_teraflops,
                    .product_share = share8(900),
                    .memory_share = share_of_memory(3.9),
                    .row_step = 64,
                    .adds_rows = true},
    DeviceKernelRow{.name = "cuda.reference",
                    .supports = reference_supports,
                    .tiles = reference_tiles,
                    .make = make_reference,
                    .arithmetic = "reference",
                    .products = &cuda::DeviceRates::float32_teraflops,
                    .product_share = 1 / kMeasured.float32_teraflops,
                    .memory_share = share_of_memory(1)},
};

}  // namespace

Catalog<DeviceKernelRow> device_kernel_catalog() { return Catalog<DeviceKernelRow>(kRows); }

}  // namespace conclave::inline v0::experts
