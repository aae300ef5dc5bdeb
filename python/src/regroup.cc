#include "regroup.h"

#include "context.h"
#include "fields.h"

#include "conclave/balance.h"
#include "conclave/checkpoint.h"
#include "conclave/regroup.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

// The options of one call, with what they point at.
struct Request {
  std::unique_ptr<WeightSource> source;
  RegroupOptions options;

  Request(Communicator& everyone, const std::optional<nb::dict>& parallel,
          const Checkpoint* checkpoint, const CheckpointFeed* feed, int64_t index,
          double processor_share, size_t piece_bytes) {
    if (checkpoint != nullptr) source = checkpoint->layer_source(index);
    if (feed != nullptr) source = feed->layer_source(index);
    options = {.everyone = &everyone,
               .source = source.get(),
               .processor_share = processor_share,
               .piece_bytes = piece_bytes};
    if (parallel) options.parallel = parallel_from_dict(*parallel);
  }
};

void bind_calls(nb::class_<PyLayer>& layer) {
  layer.def(
      "regroup",
      [](PyLayer& self, const std::shared_ptr<PyContext>& context, Communicator& everyone,
         const std::optional<nb::dict>& parallel, const Checkpoint* checkpoint,
         const CheckpointFeed* feed, int64_t index, double processor_share, size_t piece_bytes) {
        const Request request(everyone, parallel, checkpoint, feed, index, processor_share,
                              piece_bytes);
        return std::make_unique<PyLayer>(self, context, request.options);
      },
      nb::arg("context"), nb::arg("everyone"), nb::arg("parallel").none(),
      nb::arg("checkpoint").none(), nb::arg("feed").none(), nb::arg("index"),
      nb::arg("processor_share"), nb::arg("piece_bytes"),
      "The layer on other ranks, which give each other what they have.");
  layer.def(
      "hand_over",
      [](PyLayer& self, Communicator& everyone, double processor_share, size_t piece_bytes) {
        self.hand_over({.everyone = &everyone,
                        .processor_share = processor_share,
                        .piece_bytes = piece_bytes});
      },
      nb::arg("everyone"), nb::arg("processor_share"), nb::arg("piece_bytes"),
      "Gives this rank's experts to those that stay.");
  layer.def_static(
      "join",
      [](const std::shared_ptr<PyContext>& context, const nb::dict& spec, const nb::dict& options,
         bool count, Communicator& everyone, const std::optional<nb::dict>& parallel,
         const Checkpoint* checkpoint, const CheckpointFeed* feed, int64_t index,
         double processor_share, size_t piece_bytes) {
        const Request request(everyone, parallel, checkpoint, feed, index, processor_share,
                              piece_bytes);
        const LayerRequest layer{.context = context,
                                 .spec = spec_from_dict(spec),
                                 .options = options_from_dict(options),
                                 .counting = count ? Counting::kOn : Counting::kOff};
        return std::make_unique<PyLayer>(layer, request.options);
      },
      nb::arg("context"), nb::arg("spec"), nb::arg("options"), nb::arg("count"),
      nb::arg("everyone"), nb::arg("parallel").none(), nb::arg("checkpoint").none(),
      nb::arg("feed").none(), nb::arg("index"), nb::arg("processor_share"), nb::arg("piece_bytes"),
      "A layer that other ranks have, on this one as well.");
}

}  // namespace

void bind_regroup(nb::module_& module, nb::class_<PyLayer>& layer) {
  bind_calls(layer);
  module.def(
      "spread_over",
      [](int64_t num_experts, std::vector<int32_t> logical_of, std::vector<int32_t> first_of,
         const std::vector<int32_t>& old_ranks) {
        ExpertSlots slots = spread_over({.num_experts = num_experts,
                                         .logical_of = std::move(logical_of),
                                         .first_of = std::move(first_of)},
                                        old_ranks);
        return std::tuple(slots.num_experts, std::move(slots.logical_of),
                          std::move(slots.first_of));
      },
      nb::arg("num_experts"), nb::arg("logical_of"), nb::arg("first_of"), nb::arg("old_ranks"),
      "The slots of a layer on other ranks.");
}

}  // namespace conclave::python
