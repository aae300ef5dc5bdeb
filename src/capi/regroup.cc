#include "conclave/regroup.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/options.h"
#include "capi/placement.h"
#include "capi/structs.h"
#include "core/max_ranks.h"

#include "conclave/c/regroup.h"

#include <memory>
#include <utility>

namespace conclave::inline v0::capi {
namespace {

RegroupOptions regroup_options_of(const conclave_regroup_options* options) {
  const conclave_regroup_options given = take(options, "options");
  RegroupOptions result;
  result.everyone = required(given.everyone, "options.everyone").communicator.get();
  if (given.parallel != nullptr) result.parallel = parallel_of(given.parallel);
  if (given.source != nullptr) {
    result.source = required(given.source, "options.source").source.get();
  }
  if (given.processor_share != 0) result.processor_share = given.processor_share;
  if (given.piece_bytes != 0) result.piece_bytes = given.piece_bytes;
  return result;
}

// All that such a layer has is packed: it needs no source. Its place is made before other ranks
// can have theirs.
class NewLayer {
 public:
  explicit NewLayer(const std::shared_ptr<ContextState>& context)
      : context_(context), kept_(std::make_shared<KeptSources>()) {}

  void hand_out_to(conclave_layer** out, MoeLayer layer) {
    hand_out(out, std::move(context_), std::move(kept_), std::move(layer));
  }

 private:
  std::shared_ptr<ContextState> context_;
  std::shared_ptr<KeptSources> kept_;
};

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_layer_regroup(const conclave_layer* layer, const conclave_context* context,
                                       const conclave_regroup_options* options,
                                       conclave_layer** out) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& from = capi::required(layer, "layer").layer;
    const auto& state = capi::required(context, "context").state;
    capi::required(out, "out");
    const conclave::RegroupOptions request = capi::regroup_options_of(options);
    capi::NewLayer made(state);
    made.hand_out_to(out, conclave::regroup(from, *state->context, request));
  });
}

conclave_status conclave_layer_hand_over(const conclave_layer* layer,
                                         const conclave_regroup_options* options) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& from = capi::required(layer, "layer").layer;
    conclave::hand_over(from, capi::regroup_options_of(options));
  });
}

conclave_status conclave_layer_join(const conclave_context* context, const conclave_spec* spec,
                                    const conclave_layer_options* layer_options,
                                    const conclave_regroup_options* options,
                                    conclave_layer** out) noexcept {
  return capi::guarded([&] {
    const auto& state = capi::required(context, "context").state;
    const conclave::MoeSpec& of = capi::required(spec, "spec").spec;
    capi::required(out, "out");
    const conclave::RegroupOptions request = capi::regroup_options_of(options);
    const conclave::LayerOptions planned = capi::options_of(layer_options);
    capi::NewLayer made(state);
    made.hand_out_to(out, conclave::join_layer(*state->context, of, planned, request));
  });
}

conclave_status conclave_slots_spread(const conclave_slots* before, const int32_t* old_ranks,
                                      size_t num_ranks, conclave_slots** out) noexcept {
  return capi::guarded([&] {
    const conclave::ExpertSlots& from = capi::required(before, "before").slots;
    capi::required(out, "out");
    const auto ranks =
        capi::array_of(old_ranks, num_ranks, "old_ranks", "num_ranks", conclave::kMaxRanks);
    capi::hand_out(out, conclave::spread_over(from, ranks));
  });
}
