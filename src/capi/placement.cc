#include "capi/placement.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/options.h"
#include "capi/structs.h"
#include "capi/values.h"
#include "core/max_places.h"
#include "core/max_ranks.h"

#include "conclave/error.h"

#include <limits>
#include <span>
#include <string>

namespace conclave::inline v0::capi {
namespace {

[[noreturn]] void refuse(const std::string& element, int64_t found, const std::string& limit) {
  throw Error(ErrorCode::kInvalidArgument, {.what = "these are no places of experts on ranks",
                                            .tensor = element,
                                            .found = std::to_string(found),
                                            .limit = limit});
}

void check_num_experts(int64_t num_experts) {
  if (num_experts >= 1 && num_experts <= kMaxPlaces) return;
  refuse("num_experts", num_experts, "1 to " + std::to_string(kMaxPlaces));
}

// Places of a rank begin where those of the rank before end, and cover all.
void check_ranks(std::span<const int32_t> first_of, size_t num_slots) {
  for (size_t i = 0; i < first_of.size(); ++i) {
    const bool is_last = i + 1 == first_of.size();
    const int64_t least = i == 0 ? 0 : first_of[i - 1];
    const auto most = i == 0 ? int64_t{0} : static_cast<int64_t>(num_slots);
    const bool is_right = first_of[i] >= (is_last ? most : least) && first_of[i] <= most;
    if (is_right) continue;
    refuse("first_of[" + std::to_string(i) + "]", first_of[i],
           std::to_string(is_last ? most : least) + " to " + std::to_string(most));
  }
}

ExpertSlots slots_of_arrays(int64_t num_experts, std::span<const int32_t> logical_of,
                            std::span<const int32_t> first_of) {
  check_num_experts(num_experts);
  check_ranks(first_of, logical_of.size());
  for (size_t i = 0; i < logical_of.size(); ++i) {
    if (logical_of[i] >= 0 && logical_of[i] < num_experts) continue;
    refuse("logical_of[" + std::to_string(i) + "]", logical_of[i],
           "0 to " + std::to_string(num_experts - 1));
  }
  return {.num_experts = num_experts,
          .logical_of = {logical_of.begin(), logical_of.end()},
          .first_of = {first_of.begin(), first_of.end()}};
}

std::span<const double> load_of(const double* load, size_t num_experts) {
  return array_of(load, num_experts, "load", "num_experts", kMaxPlaces);
}

BalanceRequest request_of(const conclave_balance_options* options) {
  const conclave_balance_options given = take_optional(options, "options");
  check_flags("options.flags", given.flags, CONCLAVE_BALANCE_SHARED_RANKS);
  if (given.num_ranks > kMaxRanks) check_choice("options.num_ranks", given.num_ranks, kMaxRanks);
  if (given.num_redundant_experts > kMaxPlaces) {
    check_choice("options.num_redundant_experts", given.num_redundant_experts, kMaxPlaces);
  }
  BalanceRequest request{.num_redundant_experts = given.num_redundant_experts,
                         .distinct_ranks = (given.flags & CONCLAVE_BALANCE_SHARED_RANKS) == 0};
  if (given.rule != nullptr) request.rule = given.rule;
  if (given.num_ranks != 0) request.num_ranks = given.num_ranks;
  if (given.num_nodes != 0) request.num_nodes = given.num_nodes;
  if (given.num_groups != 0) request.num_groups = given.num_groups;
  if (given.previous != nullptr) {
    request.previous = required(given.previous, "options.previous").slots.logical_of;
  }
  if (given.least_gain != 0) request.least_gain = given.least_gain;
  return request;
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_slots_create(int64_t num_experts, const int32_t* logical_of,
                                      size_t num_slots, const int32_t* first_of, size_t num_ranks,
                                      conclave_slots** out) noexcept {
  return capi::guarded([&] {
    capi::required(out, "out");
    const auto places =
        capi::array_of(logical_of, num_slots, "logical_of", "num_slots", conclave::kMaxPlaces);
    if (num_ranks < 1 || num_ranks > static_cast<size_t>(conclave::kMaxRanks)) {
      capi::refuse("num_ranks", static_cast<int64_t>(num_ranks),
                   "1 to " + std::to_string(conclave::kMaxRanks));
    }
    const auto ranks = capi::array_of(first_of, num_ranks + 1, "first_of", "num_ranks",
                                      size_t{conclave::kMaxRanks} + 1);
    capi::hand_out(out, capi::slots_of_arrays(num_experts, places, ranks));
  });
}

conclave_status conclave_slots_from_parallel(int64_t num_experts, const conclave_parallel* parallel,
                                             conclave_slots** out) noexcept {
  return capi::guarded([&] {
    capi::required(out, "out");
    capi::check_num_experts(num_experts);
    capi::hand_out(out, conclave::slots_of(num_experts, capi::parallel_of(parallel)));
  });
}

conclave_status conclave_layer_slots(const conclave_layer* layer, conclave_slots** out) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& of = capi::required(layer, "layer").layer;
    capi::required(out, "out");
    capi::hand_out(out, of.slots());
  });
}

conclave_status conclave_slots_balance(const double* load, size_t num_experts,
                                       const conclave_balance_options* options,
                                       conclave_slots** out) noexcept {
  return capi::guarded([&] {
    capi::required(out, "out");
    const conclave::BalanceRequest request = capi::request_of(options);
    capi::hand_out(out, conclave::balance_experts(capi::load_of(load, num_experts), request));
  });
}

void conclave_slots_destroy(conclave_slots* slots) noexcept { delete slots; }

conclave_status conclave_slots_get_info(const conclave_slots* slots,
                                        conclave_slots_info* info) noexcept {
  return capi::guarded([&] {
    const conclave::ExpertSlots& from = capi::required(slots, "slots").slots;
    capi::fill(capi::fillable(info, "info"), {.struct_size = 0,
                                              .num_experts = from.num_experts,
                                              .logical_of = from.logical_of.data(),
                                              .num_slots = from.logical_of.size(),
                                              .first_of = from.first_of.data(),
                                              .num_ranks = from.first_of.size() - 1});
  });
}

conclave_status conclave_slots_balancedness(const conclave_slots* slots, const double* load,
                                            size_t num_experts, double* balancedness) noexcept {
  return capi::guarded([&] {
    const conclave::ExpertSlots& of = capi::required(slots, "slots").slots;
    double& to = capi::required(balancedness, "balancedness");
    to = conclave::balancedness(capi::load_of(load, num_experts), of);
  });
}

conclave_status conclave_slots_moved(const conclave_slots* before, const conclave_slots* after,
                                     int64_t* moved) noexcept {
  return capi::guarded([&] {
    const conclave::ExpertSlots& from = capi::required(before, "before").slots;
    const conclave::ExpertSlots& to = capi::required(after, "after").slots;
    capi::required(moved, "moved") = conclave::moved_experts(from, to);
  });
}
