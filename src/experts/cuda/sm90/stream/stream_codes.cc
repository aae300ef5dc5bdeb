#include "experts/cuda/sm90/stream/stream_codes.h"

#include "core/checked.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/hopper_support.h"
#include "quant/gpu_rows.h"
#include "quant/weight_format.h"

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
// Forms of fewer checkpoints have fewer kernels, of which each adds to the library.
template <int64_t kBits, bool kFine, bool kOffsets>
constexpr std::array kFewTiles = {
    tile_of({.bits = kBits, .fine = kFine, .offsets = kOffsets}, 16, 128),
    tile_of({.bits = kBits, .fine = kFine, .offsets = kOffsets}, 64, 128)};

template <int64_t kBits>
std::span<const DeviceTile> tiles_of_bits(const CodeKernelForm& form) {
  if (form == CodeKernelForm{.bits = kBits}) return kAllTiles<CodeKernelForm{.bits = kBits}>;
  if (form.fine) {
    if (form.offsets) return kFewTiles<kBits, true, true>;
    return kFewTiles<kBits, true, false>;
  }
  if (form.offsets) return kFewTiles<kBits, false, true>;
  return kFewTiles<kBits, false, false>;
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
  constexpr int64_t kLongSum = 128;
  const quant::CodeBook& codes = *quant::format_of(problem.weight_dtype).codes;
  const auto all_have = [&](const auto& predicate) {
    return predicate(gate_up_factor_columns(problem)) && predicate(down_factor_columns(problem));
  };
  CodeKernelForm form{.bits = bit_size(problem.weight_dtype),
                      .fine = !all_have([](int64_t columns) { return columns != kColumnsOfStep; }),
                      .offsets = factor_form(problem) == FactorForm::kOffsets,
                      .two_terms = !codes.exact_in_bf16,
                      .exact = factor_form(problem) == FactorForm::kExact};
  form.in_order = code_order(problem) == CodeOrder::kLanesOfNumbers;
  form.long_sums = form.in_order && !form.offsets &&
                   all_have([](int64_t columns) { return columns == 0 || columns >= kLongSum; });
  return form;
}

std::span<const DeviceTile> stream_codes_tiles(const ExpertsProblem& problem) {
  const CodeKernelForm form = code_kernel_form(problem);
  if (form.exact) {
    if (form.fine) return kTilesOfLanes<CodeKernelForm{.bits = 4, .fine = true, .exact = true}>;
    return kTilesOfLanes<CodeKernelForm{.bits = 4, .exact = true}>;
  }
  if (form.in_order) {
    if (form.offsets)
      return kAllTiles<CodeKernelForm{.bits = 4, .offsets = true, .in_order = true}>;
    if (form.long_sums)
      return kTilesOfLanes<CodeKernelForm{.bits = 4, .in_order = true, .long_sums = true}>;
    return kTilesOfLanes<CodeKernelForm{.bits = 4, .in_order = true}>;
  }
  return form.bits == 4 ? tiles_of_bits<4>(form) : tiles_of_bits<8>(form);
}

StreamCodesWorkspace stream_codes_workspace(const ExpertsProblem& problem, int64_t rows) {
  constexpr int64_t kAlignment = 256;
  const auto end_of = [](size_t begin, int64_t bytes) {
    return begin + static_cast<size_t>(round_up(bytes, kAlignment));
  };
  StreamCodesWorkspace layout;
  // TMA needs rows at multiples of 16 bytes.
  layout.stride = round_up(problem.intermediate_size, 8);
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
