// Row "cuda.tile_codes_sm90": weights are codes of 4 or 8 bits, which are rounded once to bf16 with
// their factors, in registers, for many rows of each expert.
#pragma once

#include "experts/cuda/device_experts.h"

#include <cstdint>
#include <memory>
#include <span>

namespace conclave::inline v0::experts {

// It takes what stream_codes_supports takes, with scales of whole rows or exact ones or, where rows
// stay as they are and have many of them, of up to 128 columns: a weight's rounding is the same for
// all codes of one value and scale, so that only many scales average it out.
Support tile_codes_supports(const ExpertsProblem& problem);
std::span<const DeviceTile> tile_codes_tiles(const ExpertsProblem& problem);
// The tile of the down product where tokens are grouped for `tile`: another one if few experts have
// so few items that these end together much better.
DeviceTile tile_codes_down_tile(const ExpertsProblem& problem, const DeviceTile& tile);
std::unique_ptr<DeviceExpertsKernel> make_tile_codes(const ExpertsProblem& problem,
                                                     const DeviceExperts& weights,
                                                     const DeviceTile& tile);

// This tells apart the kernels of a tile.
struct TileCodesForm {
  int64_t bits = 0;
  bool shifts = false;          // zero points or offsets
  bool whole_rows = false;      // have one scale each
  bool exact = false;           // FactorForm::kExact
  bool pairs_in_terms = false;  // CodeOrder::kLanesOfPairs with two tables
};
TileCodesForm tile_codes_form(const ExpertsProblem& problem);

// Tiles have 144 tokens and 192 weight rows, or 256 and 128. Beside two stages of codes shared
// memory has room for so many of 64 columns of the tokens.
constexpr int32_t tile_codes_token_stages(const TileCodesForm& form, int32_t tokens) {
  const bool has_many_factors = form.bits <= 4 && form.shifts && !form.whole_rows;
  return (tokens == 256 ? 4 : 5) - (has_many_factors || form.pairs_in_terms ? 1 : 0);
}

}  // namespace conclave::inline v0::experts
