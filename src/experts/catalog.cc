// Only this file of the folder depends on the build's options.
#include "experts/catalog.h"

#include "core/build_config.h"
#include "experts/cpu/rows.h"
#include "experts/cuda/adapters/adapter_kernel.h"
#include "experts/reference/reference.h"
#if CONCLAVE_BUILD_CUDA
#include "experts/cuda/reference/reference.h"
#endif
#if CONCLAVE_BUILD_SM90
#include "experts/cuda/sm90/decode/decode_row.h"
#include "experts/cuda/sm90/stream/adapted_bytes.h"
#include "experts/cuda/sm90/stream/adapted_codes.h"
#include "experts/cuda/sm90/stream/stream.h"
#include "experts/cuda/sm90/stream/stream_adapters.h"
#include "experts/cuda/sm90/stream/stream_bytes.h"
#include "experts/cuda/sm90/stream/stream_codes.h"
#include "experts/cuda/sm90/tile/tile.h"
#include "experts/cuda/sm90/tile_bytes/tile_bytes.h"
#include "experts/cuda/sm90/tile_codes/tile_codes.h"
#endif

#include <array>
#include <vector>

namespace conclave::inline v0::experts {
namespace {

constexpr std::string_view kF32Fma = cpu::to_string(cpu::Arithmetic::kF32Fma);
constexpr std::string_view kInt8Dot = cpu::to_string(cpu::Arithmetic::kInt8Dot);

constexpr std::array kHostRows = {
    HostKernelRow{{.name = "cpu.amx", .supports = amx_supports},
                  {.arithmetic = cpu::to_string(cpu::Arithmetic::kAmxBf16), .make = make_amx}},
    HostKernelRow{
        {.name = "cpu.avx512_bf16", .supports = avx512_bf16_supports},
        {.arithmetic = cpu::to_string(cpu::Arithmetic::kDpBf16), .make = make_avx512_bf16}},
    HostKernelRow{{.name = "cpu.amx_int8", .supports = amx_int8_supports},
                  {.arithmetic = kInt8Dot, .make = make_amx_int8}},
    HostKernelRow{{.name = "cpu.avx512_vnni", .supports = avx512_vnni_supports},
                  {.arithmetic = kInt8Dot, .make = make_avx512_vnni}},
    HostKernelRow{{.name = "cpu.avx512", .supports = avx512_supports},
                  {.arithmetic = kF32Fma, .make = make_avx512}},
    HostKernelRow{{.name = "cpu.avx_vnni", .supports = avx_vnni_supports},
                  {.arithmetic = kInt8Dot, .make = make_avx_vnni}},
    HostKernelRow{{.name = "cpu.avx2_int8", .supports = avx2_int8_supports},
                  {.arithmetic = kInt8Dot, .make = make_avx2_int8}},
    HostKernelRow{{.name = "cpu.avx2", .supports = avx2_supports},
                  {.arithmetic = kF32Fma, .make = make_avx2}},
    HostKernelRow{{.name = "cpu.reference", .supports = cpu_reference_supports},
                  {.arithmetic = kF32Fma, .is_reference = true, .make = make_reference_kernel}},
};

#if CONCLAVE_BUILD_CUDA
constexpr std::string_view kDecodeSm90 = "cuda.decode_sm90";
constexpr std::string_view kStreamSm90 = "cuda.stream_sm90";
constexpr std::string_view kStreamCodesSm90 = "cuda.stream_codes_sm90";
constexpr std::string_view kStreamFp8Sm90 = "cuda.stream_fp8_sm90";
constexpr std::string_view kStreamInt8Sm90 = "cuda.stream_int8_sm90";
constexpr std::string_view kTileSm90 = "cuda.tile_sm90";
constexpr std::string_view kTileCodesSm90 = "cuda.tile_codes_sm90";
constexpr std::string_view kTileFp4Fp8Sm90 = "cuda.tile_fp4_fp8_sm90";
constexpr std::string_view kTileFp8Sm90 = "cuda.tile_fp8_sm90";
constexpr std::string_view kTileInt8Sm90 = "cuda.tile_int8_sm90";

// The shares were measured on an H200, whose rates they are shares of.
constexpr const cuda::DeviceRates& kMeasured = cuda::kH200Rates;
constexpr double share_of_memory(double terabytes) {
  return terabytes / kMeasured.memory_terabytes;
}
constexpr double share_of_cache(double terabytes) { return terabytes / kMeasured.cache_terabytes; }
#endif

#if CONCLAVE_BUILD_SM90
constexpr double share16(double teraflops) { return teraflops / kMeasured.tensor16_teraflops; }
constexpr double share8(double teraflops) { return teraflops / kMeasured.tensor8_teraflops; }

// Kernels of bytes, whatever these are.
constexpr TileCost kStreamBytesCost{.products = &cuda::DeviceRates::tensor8_teraflops,
                                    .product_share = share8(450),
                                    .memory_share = share_of_memory(4.3)};
constexpr TileCost kTileBytesCost{.products = &cuda::DeviceRates::tensor8_teraflops,
                                  .product_share = share8(900),
                                  .memory_share = share_of_memory(3.9),
                                  .row_step = 64};

// Weights are decoded on their way. A rate of 1.6 gives the times measured; half of it is as far
// above them as the costs of the kernels of codes are, so that the choice falls where times cross.
constexpr TileCost decoded_bytes_cost() {
  TileCost cost = kTileBytesCost;
  cost.decode_share = share_of_cache(0.7);
  return cost;
}

constexpr std::array kOneLaunchRows = {
    OneLaunchRow{{.name = kDecodeSm90, .supports = decode_supports},
                 {.reach = decode_reach, .make = make_decode, .workspace_bytes = decode_bytes}},
};
#else
constexpr std::array<OneLaunchRow, 0> kOneLaunchRows = {};
#endif

#if CONCLAVE_BUILD_CUDA
constexpr std::array kDeviceRows = {
#if CONCLAVE_BUILD_SM90
    DeviceKernelRow{{.name = kStreamSm90, .supports = stream_sm90_supports},
                    {.arithmetic = "wgmma",
                     .tiles = stream_sm90_tiles,
                     .make = make_stream_sm90,
                     .workspace_bytes = stream_sm90_bytes,
                     .cost = {.product_share = share16(350),
                              .memory_share = share_of_memory(4.5),
                              .sorted_product_share = share16(680),
                              .sorted_memory_share = share_of_memory(4.0),
                              .sorted_row_step = 8,
                              .sorted_end_depth = 384}}},
    DeviceKernelRow{{.name = kStreamFp8Sm90, .supports = stream_fp8_supports},
                    {.arithmetic = "wgmma_e4m3",
                     .tiles = stream_bytes_tiles,
                     .make = make_stream_fp8,
                     .workspace_bytes = stream_bytes_memory,
                     .cost = kStreamBytesCost}},
    DeviceKernelRow{{.name = kStreamInt8Sm90, .supports = stream_int8_supports},
                    {.arithmetic = "wgmma_int8",
                     .tiles = stream_bytes_tiles,
                     .make = make_stream_int8,
                     .workspace_bytes = stream_bytes_memory,
                     .cost = kStreamBytesCost}},
    DeviceKernelRow{{.name = kStreamCodesSm90, .supports = stream_codes_supports},
                    {.arithmetic = "wgmma_codes",
                     .tiles = stream_codes_tiles,
                     .make = make_stream_codes,
                     .workspace_bytes = stream_codes_bytes,
                     .cost = {.product_share = share16(350),
                              .memory_share = share_of_memory(3),
                              .row_step = 16,
                              .decode_share = share_of_cache(2),
                              .wide_share = 0.85},
                     .reads_factors = true,
                     .reads_values = true}},
    DeviceKernelRow{{.name = kTileCodesSm90, .supports = tile_codes_supports},
                    {.arithmetic = "wgmma_rounded_codes",
                     .tiles = tile_codes_tiles,
                     .make = make_tile_codes,
                     .workspace_bytes = stream_codes_bytes,
                     .cost = {.product_share = share16(560),
                              .memory_share = share_of_memory(3),
                              .row_step = 64,
                              .decode_share = share_of_cache(2.6)},
                     .reads_factors = true,
                     .reads_values = true}},
    DeviceKernelRow{{.name = kTileSm90, .supports = tile_sm90_supports},
                    {.arithmetic = "wgmma",
                     .tiles = tile_sm90_tiles,
                     .make = make_tile_sm90,
                     .workspace_bytes = tile_sm90_bytes,
                     .cost = {.product_share = share16(620),
                              .memory_share = share_of_memory(4.0),
                              .row_step = 64},
                     .adds_rows = true}},
    DeviceKernelRow{{.name = kTileFp8Sm90, .supports = tile_fp8_supports},
                    {.arithmetic = "wgmma_e4m3",
                     .tiles = tile_bytes_tiles,
                     .make = make_tile_fp8,
                     .workspace_bytes = tile_bytes_memory,
                     .cost = kTileBytesCost,
                     .adds_rows = true}},
    DeviceKernelRow{{.name = kTileFp4Fp8Sm90, .supports = tile_fp4_fp8_supports},
                    {.arithmetic = "wgmma_e5m2_e4m3",
                     .tiles = tile_fp4_fp8_tiles,
                     .make = make_tile_fp4_fp8,
                     .workspace_bytes = tile_bytes_memory,
                     .cost = decoded_bytes_cost(),
                     .adds_rows = true,
                     .reads_factors = true,
                     .decoded = DType::kF8E4M3,
                     .decodes_lanes = true}},
    DeviceKernelRow{{.name = kTileInt8Sm90, .supports = tile_int8_supports},
                    {.arithmetic = "wgmma_int8",
                     .tiles = tile_bytes_tiles,
                     .make = make_tile_int8,
                     .workspace_bytes = tile_bytes_memory,
                     .cost = kTileBytesCost,
                     .adds_rows = true}},
#endif
    DeviceKernelRow{{.name = "cuda.reference", .supports = reference_supports},
                    {.arithmetic = kF32Fma,
                     .is_reference = true,
                     .tiles = reference_tiles,
                     .make = make_reference,
                     .workspace_bytes = reference_bytes,
                     .cost = {.products = &cuda::DeviceRates::float32_teraflops,
                              .product_share = 1 / kMeasured.float32_teraflops,
                              .memory_share = share_of_memory(1)},
                     .reads_values = true}},
};

constexpr std::array kAdapterRows = {
#if CONCLAVE_BUILD_SM90
    AdapterKernelRow{.name = kStreamSm90,
                     .arithmetic = "wgmma",
                     .supports = stream_adapters_supports,
                     .tiles = stream_adapters_tiles,
                     .make = make_stream_adapters,
                     .workspace_bytes = stream_sm90_bytes},
    AdapterKernelRow{.name = kStreamFp8Sm90,
                     .arithmetic = "wgmma_e4m3",
                     .supports = stream_fp8_supports,
                     .tiles = adapted_bytes_tiles,
                     .make = make_adapted_fp8,
                     .workspace_bytes = adapted_bytes_memory},
    AdapterKernelRow{.name = kStreamInt8Sm90,
                     .arithmetic = "wgmma_int8",
                     .supports = stream_int8_supports,
                     .tiles = adapted_bytes_tiles,
                     .make = make_adapted_int8,
                     .workspace_bytes = adapted_bytes_memory},
    AdapterKernelRow{.name = kStreamCodesSm90,
                     .arithmetic = "wgmma_codes",
                     .supports = adapted_codes_supports,
                     .tiles = adapted_codes_tiles,
                     .make = make_adapted_codes,
                     .workspace_bytes = stream_codes_bytes,
                     .reads_values = true,
                     .reads_factors = true},
#endif
    AdapterKernelRow{.name = "cuda.reference",
                     .arithmetic = kF32Fma,
                     .supports = reference_supports,
                     .tiles = reference_tiles,
                     .make = make_adapted_reference,
                     .workspace_bytes = reference_bytes,
                     .reads_values = true},
};
#else
constexpr std::array<DeviceKernelRow, 0> kDeviceRows = {};
constexpr std::array<AdapterKernelRow, 0> kAdapterRows = {};
#endif

#if CONCLAVE_BUILD_CUDA && !CONCLAVE_BUILD_SM90
Support needs_90a(const ExpertsProblem& /*problem*/) {
  return Support::no("left out of this build, whose CONCLAVE_CUDA_ARCHITECTURES lacks 90a");
}

constexpr std::array kLeftOutRows = {
    KernelRow{.name = kDecodeSm90, .supports = needs_90a},
    KernelRow{.name = kStreamSm90, .supports = needs_90a},
    KernelRow{.name = kStreamFp8Sm90, .supports = needs_90a},
    KernelRow{.name = kStreamInt8Sm90, .supports = needs_90a},
    KernelRow{.name = kStreamCodesSm90, .supports = needs_90a},
    KernelRow{.name = kTileCodesSm90, .supports = needs_90a},
    KernelRow{.name = kTileSm90, .supports = needs_90a},
    KernelRow{.name = kTileFp8Sm90, .supports = needs_90a},
    KernelRow{.name = kTileFp4Fp8Sm90, .supports = needs_90a},
    KernelRow{.name = kTileInt8Sm90, .supports = needs_90a},
};
#else
constexpr std::array<KernelRow, 0> kLeftOutRows = {};
#endif

}  // namespace

Catalog<HostKernelRow> host_kernels() { return Catalog<HostKernelRow>(kHostRows); }
Catalog<DeviceKernelRow> device_kernels() { return Catalog<DeviceKernelRow>(kDeviceRows); }
Catalog<OneLaunchRow> one_launch_kernels() { return Catalog<OneLaunchRow>(kOneLaunchRows); }
std::span<const AdapterKernelRow> adapter_kernels() { return kAdapterRows; }
std::span<const KernelRow> left_out_kernels() { return kLeftOutRows; }

KernelRow find_device_row(std::string_view name) {
  std::vector<KernelRow> rows(kOneLaunchRows.begin(), kOneLaunchRows.end());
  rows.insert(rows.end(), kDeviceRows.begin(), kDeviceRows.end());
  rows.insert(rows.end(), kLeftOutRows.begin(), kLeftOutRows.end());
  return Catalog<KernelRow>(rows).find(name, "kernel");
}

}  // namespace conclave::inline v0::experts
