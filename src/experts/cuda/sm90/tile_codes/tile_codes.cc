#include "experts/cuda/sm90/tile_codes/tile_codes.h"

#include "core/checked.h"
#include "core/weight_types.h"
#include "experts/cuda/factor_planes.h"
#include "experts/cuda/sm90/code_values.h"
#include "experts/cuda/sm90/stream/signed_bytes.h"
#include "experts/cuda/sm90/stream/stream_codes.h"
#include "quant/weight_format.h"

#include <fmt/format.h>

#include <array>

namespace conclave::inline v0::experts {
namespace {

// There are kernels for each of these.
template <int64_t kBits, bool kShifts, bool kWholeRows>
constexpr DeviceTile tile_of(int32_t tokens, int32_t weight_rows) {
  return {.tokens = tokens,
          .features = weight_rows,
          .depth = 128,
          .stages = tile_codes_token_stages(
              {.bits = kBits, .shifts = kShifts, .whole_rows = kWholeRows}, tokens),
          .sorted_input = true};
}
template <int64_t kBits, bool kShifts, bool kWholeRows = false>
constexpr std::array kTiles = {tile_of<kBits, kShifts, kWholeRows>(144, 192),
                               tile_of<kBits, kShifts, kWholeRows>(256, 128)};

// Codes of 2 bits have half as many bytes.
constexpr DeviceTile small_codes_tile(DeviceTile tile) {
  tile.depth = 64;
  return tile;
}
constexpr std::array kSmallCodesTiles = {small_codes_tile(kTiles<4, true>[0]),
                                         small_codes_tile(kTiles<4, true>[1])};

// A sum of many columns with many scales averages the rounding of weights out: with these each
// output stays within the bar of a bf16 layer.
constexpr int64_t kLeastColumns = 512;
constexpr int64_t kMostColumnsOfScale = 128;
constexpr int64_t kLeastScales = 6;

Support averages_out(int64_t columns, int64_t columns_of_scale) {
  if (columns < kLeastColumns) {
    return Support::no(
        fmt::format("rounds weights, and so takes sums of at least {} columns; "
                    "found {}",
                    kLeastColumns, columns));
  }
  if (columns_of_scale != 0 && columns_of_scale <= kMostColumnsOfScale &&
      columns >= kLeastScales * columns_of_scale) {
    return Support::yes();
  }
  return Support::no(
      fmt::format("rounds weights, and so takes rows of at least {} scales, of up to "
                  "{} columns each; found one for {} of {}",
                  kLeastScales, kMostColumnsOfScale,
                  columns_of_scale == 0 ? columns : columns_of_scale, columns));
}

bool has_whole_rows(const ExpertsProblem& problem) {
  return gate_up_factor_columns(problem) == 0 && down_factor_columns(problem) == 0;
}

Support supports_scales(const ExpertsProblem& problem) {
  if (factor_form(problem) == FactorForm::kExact) return Support::yes();
  if (!has_whole_rows(problem)) {
    const Support up = averages_out(problem.input_columns(), gate_up_factor_columns(problem));
    return up ? averages_out(problem.intermediate_size, down_factor_columns(problem)) : up;
  }
  if (!quant::format_of(problem.weight_dtype).codes->exact_in_bf16) {
    return Support::no("takes rows of one scale with codes whose values bf16 holds");
  }
  if (!has_offsets(factor_form(problem))) return Support::yes();
  return Support::no("takes rows of one scale without offsets");
}

// Weight rows that a multiprocessor takes one after another in the down product, if each expert has
// one tile of tokens.
int64_t down_rows_in_turn(const ExpertsProblem& problem, const DeviceTile& tile) {
  const int64_t items =
      problem.num_local_experts * ceil_div(problem.hidden_size, int64_t{tile.features});
  return ceil_div(items, int64_t{problem.gpu().multiprocessors}) * tile.features;
}

}  // namespace

Support tile_codes_supports(const ExpertsProblem& problem) {
  if (Support codes = stream_codes_supports(problem); !codes) return codes;
  const bool rounds = factor_form(problem) != FactorForm::kExact && !has_whole_rows(problem);
  if (rounds && problem.quant.activations != ActivationScale::kNone) {
    // Activated rows would become other codes than those of exact products.
    return Support::no("rounds weights, and so takes rows as they are");
  }
  if (row_terms(problem) != 1 || problem.quant.has_column_order) {
    return Support::no("takes rows that all experts share, as bf16 values");
  }
  // Kernels with a table of 8 bits have no zero points.
  if (bit_size(problem.weight_dtype) == 8 && problem.quant.zeros != WeightZero::kNone &&
      !are_signed_bytes(problem)) {
    return Support::no("takes codes of 8 bits with zero points where they are whole numbers");
  }
  return supports_scales(problem);
}

TileCodesForm tile_codes_form(const ExpertsProblem& problem) {
  const FactorForm form = factor_form(problem);
  return {.bits = bit_size(problem.weight_dtype),
          .shifts = form == FactorForm::kZeros || has_offsets(form),
          .whole_rows = has_whole_rows(problem),
          .exact = form == FactorForm::kExact,
          .pairs_in_terms = code_order(problem) == CodeOrder::kLanesOfPairs &&
                            takes_two_terms(problem.weight_dtype)};
}

std::span<const DeviceTile> tile_codes_tiles(const ExpertsProblem& problem) {
  if (code_order(problem) == CodeOrder::kLanesOfSmallNumbers) return kSmallCodesTiles;
  const TileCodesForm form = tile_codes_form(problem);
  if (form.bits == 4) {
    if (form.whole_rows) return kTiles<4, false, true>;
    // As many stages as beside two tables.
    if (form.shifts || form.pairs_in_terms) return kTiles<4, true>;
    return kTiles<4, false>;
  }
  if (form.whole_rows) return kTiles<8, false, true>;
  if (form.shifts) return kTiles<8, true>;
  return kTiles<8, false>;
}

DeviceTile tile_codes_down_tile(const ExpertsProblem& problem, const DeviceTile& tile) {
  // Tiles of more tokens take longer for a weight row where tokens are few.
  constexpr double kLeastGain = 1.15;
  const DeviceTile& widest = tile_codes_tiles(problem).back();
  const auto rows = static_cast<double>(down_rows_in_turn(problem, tile));
  const auto rows_of_widest = static_cast<double>(down_rows_in_turn(problem, widest));
  return rows >= kLeastGain * rows_of_widest ? widest : tile;
}

}  // namespace conclave::inline v0::experts
