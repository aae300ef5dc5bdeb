#include "experts/cuda/sm90/stream/stream_codes.h"

#include "core/checked.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/code_values.h"
#include "experts/cuda/sm90/hopper_support.h"
#include "experts/cuda/sm90/stream/byte_offsets.h"
#include "experts/cuda/sm90/stream/counters.h"
#include "experts/cuda/sm90/stream/signed_bytes.h"
#include "quant/gpu_rows.h"
#include "quant/weight_format.h"

#include <algorithm>
#include <array>
#include <string>

namespace conclave::inline v0::experts {
namespace {

// stream_codes.cu has a kernel for each of these.
constexpr DeviceTile tile_of(const CodeKernelForm& form, int32_t tokens, int32_t weight_rows) {
  return {.tokens = tokens,
          .features = weight_rows,
          .depth = 128,
          .stages = code_stages(form, tokens, weight_rows)};
}
template <CodeKernelForm kForm>
constexpr std::array kAllTiles = {tile_of(kForm, 16, 128), tile_of(kForm, 16, 256),
                                  tile_of(kForm, 32, 128), tile_of(kForm, 32, 256),
                                  tile_of(kForm, 64, 128), tile_of(kForm, 96, 128)};
template <CodeKernelForm kForm>
constexpr std::array kTilesOfLanes = {tile_of(kForm, 16, 128), tile_of(kForm, 16, 256),
                                      tile_of(kForm, 32, 128), tile_of(kForm, 32, 256),
                                      tile_of(kForm, 64, 128), tile_of(kForm, 64, 256),
                                      tile_of(kForm, 96, 128)};
// For codes times steps: tiles of GGUF's smallest types, which few layers have alone.
template <bool kOffsets>
constexpr CodeKernelForm kTimesSteps = {
    .bits = 4, .columns_of_sum = 16, .offsets = kOffsets, .in_order = true, .steps = true};
template <bool kOffsets>
constexpr std::array kTilesOfSteps = {
    tile_of(kTimesSteps<kOffsets>, 16, 128), tile_of(kTimesSteps<kOffsets>, 16, 256),
    tile_of(kTimesSteps<kOffsets>, 32, 256), tile_of(kTimesSteps<kOffsets>, 64, 128)};
constexpr DeviceTile small_codes_tile(int32_t tokens, int32_t weight_rows) {
  DeviceTile tile = tile_of(kSmallCodesForm, tokens, weight_rows);
  tile.depth = 64;
  return tile;
}
constexpr std::array kSmallCodesTiles = {small_codes_tile(16, 256), small_codes_tile(32, 256),
                                         small_codes_tile(64, 128)};
template <bool kSteps>
constexpr DeviceTile byte_offset_tile(int32_t tokens, int32_t weight_rows) {
  return {.tokens = tokens,
          .features = weight_rows,
          .depth = 128,
          .stages = byte_offset_stages(kSteps, tokens, weight_rows)};
}
template <bool kSteps>
constexpr std::array kByteOffsetTiles = {
    byte_offset_tile<kSteps>(16, 128), byte_offset_tile<kSteps>(16, 256),
    byte_offset_tile<kSteps>(32, 128), byte_offset_tile<kSteps>(32, 256),
    byte_offset_tile<kSteps>(64, 128), byte_offset_tile<kSteps>(96, 128)};
constexpr DeviceTile signed_byte_tile(int32_t tokens, int32_t weight_rows) {
  return {.tokens = tokens,
          .features = weight_rows,
          .depth = 128,
          .stages = signed_byte_stages(tokens, weight_rows)};
}
constexpr std::array kSignedByteTiles = {signed_byte_tile(16, 128), signed_byte_tile(16, 256),
                                         signed_byte_tile(32, 128), signed_byte_tile(32, 256),
                                         signed_byte_tile(64, 128), signed_byte_tile(96, 128)};
// Forms of fewer checkpoints have fewer kernels, of which each adds to the library.
template <CodeKernelForm kForm>
constexpr std::array kFewTiles = {tile_of(kForm, 16, 128), tile_of(kForm, 64, 128)};

// Codes as stored.
template <int64_t kBits>
std::span<const DeviceTile> few_tiles(const CodeKernelForm& form) {
  if (form.columns_of_sum == 16) {
    if (form.offsets) {
      return kFewTiles<CodeKernelForm{.bits = kBits, .columns_of_sum = 16, .offsets = true}>;
    }
    return kFewTiles<CodeKernelForm{.bits = kBits, .columns_of_sum = 16}>;
  }
  if (form.offsets) return kFewTiles<CodeKernelForm{.bits = kBits, .offsets = true}>;
  return kFewTiles<CodeKernelForm{.bits = kBits}>;
}

// wgmma multiplies 16 columns at once.
constexpr int64_t kColumnsOfStep = 16;

Support supports_groups(const ExpertsProblem& problem) {
  for (const int64_t columns : {gate_up_factor_columns(problem), down_factor_columns(problem)}) {
    if (columns % kColumnsOfStep == 0) continue;
    return Support::no("takes scales of whole multiples of 16 columns; found " +
                       std::to_string(problem.quant.block_cols) +
                       (problem.skipped_columns == 0
                            ? ""
                            : ", of which " + std::to_string(problem.skipped_columns) +
                                  " lie before this rank's"));
  }
  return Support::yes();
}

}  // namespace

Support stream_codes_supports(const ExpertsProblem& problem) {
  if (Support device = is_hopper(problem.gpu()); !device) return device;
  const quant::WeightFormat* format = quant::find_format(problem.weight_dtype);
  if (format == nullptr || format->codes == nullptr) {
    return Support::no("takes weights that are codes; found " +
                       std::string(conclave::to_string(problem.weight_dtype)));
  }
  const QuantSpec& quant = problem.quant;
  if (!format->codes->exact_in_bf16) {
    if (bit_size(problem.weight_dtype) != 4 || quant.zeros != WeightZero::kNone) {
      return Support::no("takes codes whose values bf16 does not hold with 4 bits, without zeros");
    }
  }
  if (Support rows = quant::value_rows_support(problem.weight_dtype, quant); !rows) return rows;
  if (quant.weights == WeightScale::kNone) return Support::no("takes weights with scales");
  return supports_groups(problem);
}

CodeKernelForm code_kernel_form(const ExpertsProblem& problem) {
  const auto all_share = [&](int64_t columns) {
    return std::ranges::all_of(
        std::array{gate_up_factor_columns(problem), down_factor_columns(problem)},
        [&](int64_t shared) { return shared == 0 || shared >= columns; });
  };
  const CodeOrder order = code_order(problem);
  CodeKernelForm form{
      .bits = code_bits(problem),
      .columns_of_sum = all_share(32) ? 32 : 16,
      .offsets = has_offsets(factor_form(problem)),
      .two_terms = takes_two_terms(problem.weight_dtype),
      .in_order = order == CodeOrder::kLanesOfNumbers || order == CodeOrder::kLanesOfSmallNumbers,
      .in_pairs = order == CodeOrder::kLanesOfPairs,
      .exact = factor_form(problem) == FactorForm::kExact,
      .steps = has_steps(factor_form(problem))};
  if (form.bits == 8) {
    form.in_order = are_signed_bytes(problem) && form.columns_of_sum == 32;
    return form;
  }
  if (form.in_pairs && all_share(64)) form.columns_of_sum = 64;
  if (form.in_order && !form.offsets && all_share(128)) form.columns_of_sum = 128;
  return form;
}

std::span<const DeviceTile> stream_codes_tiles(const ExpertsProblem& problem) {
  const CodeKernelForm form = code_kernel_form(problem);
  if (form.exact) {
    if (form.columns_of_sum == 16) {
      return kTilesOfLanes<CodeKernelForm{.bits = 4, .columns_of_sum = 16, .exact = true}>;
    }
    return kTilesOfLanes<CodeKernelForm{.bits = 4, .exact = true}>;
  }
  if (is_byte_offsets(form)) {
    return form.steps ? std::span<const DeviceTile>(kByteOffsetTiles<true>)
                      : std::span<const DeviceTile>(kByteOffsetTiles<false>);
  }
  if (form == kSignedBytesForm) return kSignedByteTiles;
  if (form == kSmallCodesForm) return kSmallCodesTiles;
  if (multiplies_steps(form)) {
    return form.offsets ? std::span<const DeviceTile>(kTilesOfSteps<true>)
                        : std::span<const DeviceTile>(kTilesOfSteps<false>);
  }
  if (form.in_order) {
    if (form.steps) {
      return kAllTiles<CodeKernelForm{.bits = 4, .offsets = true, .in_order = true, .steps = true}>;
    }
    if (form.offsets)
      return kAllTiles<CodeKernelForm{.bits = 4, .offsets = true, .in_order = true}>;
    if (form.columns_of_sum == 128) {
      return kTilesOfLanes<CodeKernelForm{.bits = 4, .columns_of_sum = 128, .in_order = true}>;
    }
    return kTilesOfLanes<CodeKernelForm{.bits = 4, .in_order = true}>;
  }
  if (form.in_pairs) {
    if (form.two_terms) {
      return kAllTiles<CodeKernelForm{
          .bits = 4, .columns_of_sum = 64, .two_terms = true, .in_pairs = true}>;
    }
    if (form.columns_of_sum == 64)
      return kAllTiles<CodeKernelForm{.bits = 4, .columns_of_sum = 64, .in_pairs = true}>;
    return kAllTiles<CodeKernelForm{.bits = 4, .in_pairs = true}>;
  }
  if (form.bits == 4) return few_tiles<4>(form);
  if (form.steps) {
    return kAllTiles<CodeKernelForm{.bits = 8, .columns_of_sum = 16, .steps = true}>;
  }
  if (form == CodeKernelForm{.bits = 8}) return kAllTiles<CodeKernelForm{.bits = 8}>;
  return few_tiles<8>(form);
}

StreamCodesWorkspace stream_codes_workspace(const ExpertsProblem& problem, int64_t rows) {
  constexpr int64_t kAlignment = 256;
  const auto end_of = [](size_t begin, int64_t bytes) {
    return begin + static_cast<size_t>(round_up(bytes, kAlignment));
  };
  StreamCodesWorkspace layout;
  // TMA needs rows at multiples of 16 bytes.
  layout.stride = round_up(problem.intermediate_size, 8);
  layout.rows = stream::kCounterBytes;
  layout.floats = end_of(layout.rows, rows * layout.stride * byte_size(DType::kBF16));
  layout.factors = layout.bytes = layout.floats;
  if (problem.quant.activations == ActivationScale::kNone) return layout;
  constexpr int64_t kFloat = sizeof(float);
  layout.factors = end_of(layout.floats, rows * layout.stride * kFloat);
  layout.bytes = end_of(layout.factors, rows * kFloat);
  return layout;
}

size_t stream_codes_bytes(const ExpertsProblem& problem, int64_t tokens) {
  return stream_codes_workspace(problem, tokens * problem.top_k).bytes;
}

}  // namespace conclave::inline v0::experts
