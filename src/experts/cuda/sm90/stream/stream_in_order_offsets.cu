#include "experts/cuda/sm90/stream/codes_tiles.cuh"
#include "experts/cuda/sm90/stream/offset_products.cuh"

namespace conclave::inline v0::experts::stream {
namespace {

template <class Config, Product kProduct>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stream_offsets_product(const __grid_constant__ CodedParams params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_summed_block<Config, kProduct, Consumer<Config>>(
      params, *reinterpret_cast<SummedStorage<Config>*>(bytes));
}

template <class Config>
KernelOf<CodedParams> describe(void (*function)(const CodedParams)) {
  constexpr size_t kBytes = sizeof(SummedStorage<Config>);
  static_assert(kBytes <= kMostSharedBytes, "a block has at most 227 KiB of shared memory");
  KernelOf<CodedParams> kernel = describe_kernel<Config>(function);
  kernel.shared_bytes = kBytes;
  return kernel;
}

template <int kTokens, int kWeightRows = 128>
CodesKernelPair pair() {
  constexpr CodeKernelForm kForm{.bits = 4, .offsets = true, .in_order = true};
  constexpr Shape kShape{.max_tokens = kTokens,
                         .weight_rows = kWeightRows,
                         .atoms = 4,
                         .stages = code_stages(kForm, kTokens, kWeightRows),
                         .consumers = kWeightRows / 64};
  using Own = Config<__nv_bfloat16, kShape,
                     Codes{.bits = 4, .steps_of_sum = 2, .offsets = true, .in_order = true}>;
  return {.up = describe<Own>(stream_offsets_product<Own, Product::kUp>),
          .down = describe<Own>(stream_offsets_product<Own, Product::kDown>)};
}

}  // namespace

CodesKernelPair find_kernels_in_order_with_offsets(const DeviceTile& tile) {
  const bool wide = tile.features == 256;
  switch (tile.tokens) {
    case 16:
      return wide ? pair<16, 256>() : pair<16>();
    case 32:
      return wide ? pair<32, 256>() : pair<32>();
    case 64:
      return pair<64>();
    case 96:
      return pair<96>();
    default:
      refuse_tile(tile);
  }
}

}  // namespace conclave::inline v0::experts::stream
