#include "core/catalog.h"

#include "core/build_config.h"
#include "routing/hash/hash.h"
#include "routing/router.h"
#include "routing/simulated/simulated.h"
#include "routing/sink_softmax/sink_softmax.h"
#include "routing/softmax_threshold/softmax_threshold.h"
#include "routing/sparse_mixer/sparse_mixer.h"
#include "routing/top_any/top_any.h"
#include "routing/topk/topk.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

namespace conclave::inline v0::routing {
namespace {

// Builds without CUDA have no device rows to refer to.
#if CONCLAVE_BUILD_CUDA
#define ON_DEVICE(row) (&(row))
#else
#define ON_DEVICE(row) nullptr
#endif

// The spec's name decides, not the order.
constexpr std::array kRouters = {
    RouterRow{.name = "topk",
              .traits = {.chooses_zero_experts = true},
              .check = check_topk,
              .supports = topk_supports,
              .make = make_topk_router,
              .oracle = topk_oracle,
              .draw = draw_topk,
              .device = ON_DEVICE(kTopkOnDevice)},
    RouterRow{.name = "hash",
              .traits = {.token_ids = TokenIds::kNeeded},
              .tensors = kHashTensors,
              .check = check_hash,
              .refuse_own_fields = refuse_hash_fields,
              .limit_own_fields = limit_hash_fields,
              .recalls = hash_recalls,
              .supports = hash_supports,
              .make = make_hash_router,
              .oracle = hash_oracle,
              .draw = draw_hash,
              .device = ON_DEVICE(kHashOnDevice)},
    RouterRow{.name = "sparse_mixer",
              .traits = {},
              .check = check_sparse_mixer,
              .refuse_own_fields = refuse_sparse_mixer_fields,
              .limit_own_fields = limit_sparse_mixer_fields,
              .supports = sparse_mixer_supports,
              .make = make_sparse_mixer_router,
              .oracle = sparse_mixer_oracle,
              .draw = draw_sparse_mixer,
              .device = ON_DEVICE(kSparseMixerOnDevice)},
    RouterRow{.name = "sink_softmax",
              .traits = {.weighs_shared = true},
              .check = check_sink_softmax,
              .supports = sink_softmax_supports,
              .make = make_sink_softmax_router,
              .oracle = sink_softmax_oracle,
              .draw = draw_sink_softmax,
              .device = ON_DEVICE(kSinkSoftmaxOnDevice)},
    RouterRow{.name = "softmax_threshold",
              .traits = {},
              .options = kSoftmaxThresholdOptions,
              .check = check_softmax_threshold,
              .supports = softmax_threshold_supports,
              .make = make_softmax_threshold_router,
              .oracle = softmax_threshold_oracle,
              .draw = draw_softmax_threshold,
              .device = ON_DEVICE(kSoftmaxThresholdOnDevice)},
    RouterRow{.name = "top_any",
              .traits = {},
              .tensors = kTopAnyTensors,
              .check = check_top_any,
              .supports = top_any_supports,
              .make = make_top_any_router,
              .oracle = top_any_oracle,
              .draw = draw_top_any,
              .device = ON_DEVICE(kTopAnyOnDevice)},
    RouterRow{.name = "simulated",
              .traits = {.reads_logits = false},
              .tensors = kSimulatedTensors,
              .check = check_simulated,
              .refuse_own_fields = refuse_simulated_fields,
              .recalls = simulated_recalls,
              .keep_choices = keep_simulated_choices,
              .supports = simulated_supports,
              .make = make_simulated_router,
              .oracle = simulated_oracle,
              .draw = draw_simulated,
              .device = ON_DEVICE(kSimulatedOnDevice)},
};

constexpr size_t count_ids() {
  size_t count = 0;
  for (const RouterRow& row : kRouters) {
    for (const RouterTensor& tensor : row.tensors) count += tensor.id ? 1 : 0;
  }
  return count;
}

constexpr auto kTensors = [] {
  std::array<const RouterTensor*, count_ids()> tensors{};
  size_t count = 0;
  for (const RouterRow& row : kRouters) {
    for (const RouterTensor& tensor : row.tensors) {
      if (tensor.id) tensors[count++] = &tensor;
    }
  }
  return tensors;
}();

constexpr bool ids_differ() {
  for (const RouterTensor* a : kTensors) {
    for (const RouterTensor* b : kTensors) {
      if (a != b && a->id == b->id) return false;
    }
  }
  return true;
}
static_assert(ids_differ(), "two tensors of routers have one number");
static_assert(std::ranges::all_of(kTensors, [](const RouterTensor* tensor) {
  return tensor->element == RouterElement::kFloat || tensor->index_limit != nullptr;
}));
static_assert(std::ranges::all_of(kRouters, [](const RouterRow& row) {
  return row.tensors.size() <= kMaxTensorsOfRouter;
}));

}  // namespace

Catalog<RouterRow> router_catalog() { return Catalog<RouterRow>(kRouters); }

std::span<const RouterTensor* const> all_router_tensors() { return kTensors; }

}  // namespace conclave::inline v0::routing
