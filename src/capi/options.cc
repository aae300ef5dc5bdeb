#include "capi/options.h"

#include "capi/structs.h"
#include "capi/values.h"

#include "conclave/error.h"
#include "conclave/lora.h"
#include "conclave/tuning.h"

#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace conclave::inline v0::capi {
namespace {

// The numbers of both interfaces are the same, so that a choice is only checked.
template <class Enum>
constexpr bool is_number(int32_t number, Enum value) {
  return number == static_cast<int32_t>(value);
}
static_assert(is_number(CONCLAVE_ID_POLICY_STRICT, IdPolicy::kStrict) &&
              is_number(CONCLAVE_ID_POLICY_SKIP, IdPolicy::kSkip));
static_assert(is_number(CONCLAVE_EP_TRANSPORT_VARIABLE, EpTransport::kVariable) &&
              is_number(CONCLAVE_EP_TRANSPORT_FIXED_SLOTS, EpTransport::kFixedSlots));
static_assert(is_number(CONCLAVE_EP_COMBINE_UNREDUCED, EpCombine::kUnreduced) &&
              is_number(CONCLAVE_EP_COMBINE_REDUCED_PER_RANK, EpCombine::kReducedPerRank) &&
              is_number(CONCLAVE_EP_COMBINE_ROUNDED_PER_RANK, EpCombine::kRoundedPerRank));
static_assert(is_number(CONCLAVE_CHUNK_ORDER_IN_TURN, ChunkOrder::kInTurn) &&
              is_number(CONCLAVE_CHUNK_ORDER_BY_TWOS, ChunkOrder::kByTwos) &&
              is_number(CONCLAVE_CHUNK_ORDER_MICRO_BATCHES, ChunkOrder::kMicroBatches));
static_assert(is_number(CONCLAVE_DETERMINISM_REPEATABLE, Determinism::kRepeatable) &&
              is_number(CONCLAVE_DETERMINISM_BATCH_INVARIANT, Determinism::kBatchInvariant) &&
              is_number(CONCLAVE_DETERMINISM_UNORDERED, Determinism::kUnordered));
static_assert(is_number(CONCLAVE_WEIGHT_USE_PACKED, WeightUse::kPacked) &&
              is_number(CONCLAVE_WEIGHT_USE_IN_PLACE, WeightUse::kInPlace));
static_assert(is_number(CONCLAVE_PLACEMENT_STRATEGY_LINEAR, PlacementStrategy::kLinear) &&
              is_number(CONCLAVE_PLACEMENT_STRATEGY_ROUND_ROBIN, PlacementStrategy::kRoundRobin) &&
              is_number(CONCLAVE_PLACEMENT_STRATEGY_CUSTOM, PlacementStrategy::kCustom));
static_assert(is_number(CONCLAVE_REDUCE_FULL, Reduce::kFull) &&
              is_number(CONCLAVE_REDUCE_PARTIAL, Reduce::kPartial));

std::vector<int32_t> list_of(const int32_t* numbers, size_t count, const char* name) {
  const std::string count_name = std::string(name) + "_count";
  const auto list = array_of(numbers, count, name, count_name.c_str(), kMostExperts);
  return {list.begin(), list.end()};
}

// The library refuses what it has no room for; here only numbers that it cannot be told.
int32_t adapter_rank_of(int64_t rank) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (rank < 0 || rank > kMost) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "adapters have no such rank",
                                              .tensor = "options.max_adapter_rank",
                                              .found = std::to_string(rank),
                                              .limit = "0 to " + std::to_string(kMostAdapterRank)});
  }
  return static_cast<int32_t>(rank);
}

std::shared_ptr<const TuningTable> tuning_of(const char* path) {
  if (path == nullptr) return nullptr;
  return std::make_shared<const TuningTable>(TuningTable::load(path));
}

}  // namespace

LayerOptions options_of(const conclave_layer_options* options) {
  const conclave_layer_options given = take_optional(options, "options");
  check_choice("options.reserved", given.reserved, 0);
  LayerOptions result{
      .kernel = text_of(given.kernel),
      .arithmetic = text_of(given.arithmetic),
      .transport = choice_of("options.transport", given.transport, EpTransport::kFixedSlots),
      .ep_combine = choice_of("options.ep_combine", given.ep_combine, EpCombine::kRoundedPerRank),
      .chunk_order = choice_of("options.chunk_order", given.chunk_order, ChunkOrder::kMicroBatches),
      .micro_batch_tokens = given.micro_batch_tokens,
      .determinism = choice_of("options.determinism", given.determinism, Determinism::kUnordered),
      .weights = choice_of("options.weights", given.weights, WeightUse::kInPlace),
      .spare_experts = given.spare_experts,
      .max_adapter_rank = adapter_rank_of(given.max_adapter_rank),
      .tuning = tuning_of(given.tuning)};
  result.id_policy = choice_of("options.id_policy", given.id_policy, IdPolicy::kSkip);
  if (given.max_tokens != 0) result.max_tokens = given.max_tokens;
  return result;
}

ParallelSpec parallel_of(const conclave_parallel* parallel) {
  const conclave_parallel given = take_optional(parallel, "parallel");
  check_choice("parallel.reserved", given.reserved, 0);
  return {.ep_size = given.ep_size == 0 ? 1 : given.ep_size,
          .ep_rank = given.ep_rank,
          .placement = choice_of("parallel.placement", given.placement, PlacementStrategy::kCustom),
          .rank_of = list_of(given.rank_of, given.rank_of_count, "parallel.rank_of"),
          .num_redundant_experts = given.num_redundant_experts,
          .replica_of = list_of(given.replica_of, given.replica_of_count, "parallel.replica_of"),
          .tp_size = given.tp_size == 0 ? 1 : given.tp_size,
          .tp_rank = given.tp_rank,
          .reduce = choice_of("parallel.reduce", given.reduce, Reduce::kPartial)};
}

}  // namespace conclave::inline v0::capi
