#include "experts/cuda/adapters/terms.h"
#include "experts/cuda/sm90/stream/adapted_byte_offsets.cuh"
#include "experts/cuda/sm90/stream/adapted_codes.cuh"
#include "experts/cuda/sm90/stream/adapted_codes.h"
#include "experts/cuda/sm90/stream/adapted_codes_as_stored.cuh"
#include "experts/cuda/sm90/stream/adapted_times_steps.h"
#include "experts/cuda/sm90/stream/byte_offsets.h"
#include "experts/cuda/sm90/stream/codes_products.h"
#include "experts/cuda/sm90/stream/signed_bytes.h"
#include "experts/cuda/sm90/stream/small_codes.h"

namespace conclave::inline v0::experts {
namespace {

using stream::AdaptedCodedParams;
using stream::AdaptedCodesPair;

// Chooses as stream_codes.cu does.
AdaptedCodesPair find_kernels(const ExpertsProblem& problem, const DeviceTile& tile) {
  const CodeKernelForm form = code_kernel_form(problem);
  if (form.exact) {
    return form.columns_of_sum == 16 ? stream::find_adapted_of_floats(tile)
                                     : stream::find_adapted_of_powers(tile);
  }
  if (form.two_terms) {
    return form.in_pairs ? stream::find_adapted_of_pairs_in_terms(tile)
                         : stream::find_adapted_of_terms(form, tile);
  }
  if (form == kSmallCodesForm) return stream::find_adapted_of_small_codes(tile);
  if (multiplies_steps(form)) {
    return form.offsets ? stream::find_adapted_times_offset_steps(tile)
                        : stream::find_adapted_times_steps(tile);
  }
  if (form.steps && !form.offsets) return stream::find_adapted_of_steps(tile);
  if (is_byte_offsets(form)) {
    return form.steps ? stream::find_adapted_of_bytes_with_steps(tile)
                      : stream::find_adapted_of_bytes_with_offsets(tile);
  }
  // A table makes the same numbers of bytes, whose sums are as long.
  if (form == kSignedBytesForm) return stream::find_adapted_as_stored({.bits = 8}, tile);
  if (form.in_order) {
    if (form.steps) return stream::find_adapted_in_order_with_steps(tile);
    if (form.offsets) return stream::find_adapted_in_order_with_offsets(tile);
    return form.columns_of_sum == 128 ? stream::find_adapted_of_long_sums(tile)
                                      : stream::find_adapted_in_order(tile);
  }
  if (form.in_pairs) {
    return form.columns_of_sum == 64 ? stream::find_adapted_of_wide_pairs(tile)
                                     : stream::find_adapted_of_pairs(tile);
  }
  return stream::find_adapted_as_stored(form, tile);
}

class AdaptedCodes final : public AdapterKernel {
 public:
  AdaptedCodes(const ExpertsProblem& problem, const DeviceExperts& weights, const DeviceTile& tile)
      : problem_(problem),
        products_({.row = "cuda.stream_codes_sm90",
                   .up = "experts.stream_codes_sm90.adapted_up",
                   .down = "experts.stream_codes_sm90.adapted_down"},
                  find_kernels(problem, tile), problem, weights, tile) {}

  int32_t tile_tokens() const override { return products_.tile().tokens; }

  void run(const AdaptedCall& call, CUstream_st* stream) const override {
    const DeviceExpertsCall& experts = call.experts;
    if (experts.groups.max_rows == 0) return;
    const auto rows = products_.place_intermediate(experts);
    const bool rounds = products_.rounds_rows();
    make_adapter_terms(call, AdaptedProduct::kGateUp, call.source, stream);
    AdaptedCodedParams up = stream::with_terms(products_.up(), call.up);
    // The kernel of terms has waited for the grouping.
    up.groups_are_done = true;
    products_.run_up(experts, rows, up, stream);
    make_adapter_terms(call, AdaptedProduct::kDown,
                       {.rows = rounds ? rows.floats : rows.rows,
                        .dtype = rounds ? DType::kF32 : DType::kBF16,
                        .stride = rows.stride,
                        .columns = problem_.intermediate_size,
                        .is_sorted = true},
                       stream);
    if (rounds) products_.round_rows(experts, rows, stream);
    products_.run_down(experts, rows, stream::with_terms(products_.down(), call.down), stream);
  }

 private:
  ExpertsProblem problem_;
  stream::CodesProducts<AdaptedCodedParams> products_;
};

}  // namespace

std::unique_ptr<AdapterKernel> make_adapted_codes(const ExpertsProblem& problem,
                                                  const DeviceExperts& weights,
                                                  const DeviceTile& tile) {
  return std::make_unique<AdaptedCodes>(problem, weights, tile);
}

}  // namespace conclave::inline v0::experts
