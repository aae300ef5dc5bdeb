#include "experts/cuda/sm90/stream/adapted_codes.h"

#include "experts/cuda/sm90/stream/stream_codes.h"

#include <array>

namespace conclave::inline v0::experts {
namespace {

// How many stages the kernels of these have depends on the form of the codes.
constexpr DeviceTile tile_of(int32_t tokens, int32_t weight_rows) {
  return {.tokens = tokens, .features = weight_rows, .depth = 128};
}
constexpr std::array kTilesOfFewTokens = {tile_of(16, 128)};
constexpr std::array kFewTiles = {tile_of(16, 128), tile_of(64, 128)};
constexpr std::array kTilesOfLanes = {tile_of(16, 128), tile_of(16, 256), tile_of(32, 256),
                                      tile_of(64, 128)};
constexpr DeviceTile small_codes_tile(int32_t tokens, int32_t weight_rows) {
  return {.tokens = tokens, .features = weight_rows, .depth = 64};
}
constexpr std::array kSmallCodesTiles = {small_codes_tile(16, 256), small_codes_tile(64, 128)};

}  // namespace

Support adapted_codes_supports(const ExpertsProblem& problem) {
  if (problem.quant.has_column_factors) return Support::no("takes no factors of columns");
  return stream_codes_supports(problem);
}

std::span<const DeviceTile> adapted_codes_tiles(const ExpertsProblem& problem) {
  const CodeKernelForm form = code_kernel_form(problem);
  if (form == kSmallCodesForm) return kSmallCodesTiles;
  if (has_lanes(form)) return kTilesOfLanes;
  if (has_tiles_of_many_tokens(form)) return kFewTiles;
  return kTilesOfFewTokens;
}

}  // namespace conclave::inline v0::experts
