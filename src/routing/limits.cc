#include "routing/limits.h"

#include "routing/router.h"

#include "conclave/error.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace conclave::inline v0::routing {

ExpertBans::ExpertBans(std::vector<uint8_t> left_out, const Banned& banned, int64_t num_tokens)
    : columns_(static_cast<int64_t>(left_out.size())),
      by_token_(banned.any() && banned.stride != 0) {
  if (!banned.any()) {
    flags_ = std::move(left_out);
    return;
  }
  const int64_t rows = by_token_ ? num_tokens : 1;
  flags_.reserve(static_cast<size_t>(rows * columns_));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns_; ++column) {
      const bool out = left_out[static_cast<size_t>(column)] != 0 || banned.is(row, column);
      flags_.push_back(out ? 1 : 0);
    }
  }
}

Banned ExpertBans::banned() const {
  return {.rows = flags_.data(), .stride = by_token_ ? columns_ : 0};
}

void mask_logits(const float* logits, int64_t num_tokens, int64_t num_logits, int64_t num_columns,
                 const Banned& banned, float* to) {
  if (to != logits) std::copy_n(logits, num_tokens * num_logits, to);
  for (int64_t token = 0; token < num_tokens; ++token) {
    float* const row = to + token * num_logits;
    for (int64_t column = 0; column < num_columns; ++column) {
      if (banned.is(token, column)) row[column] = -std::numeric_limits<float>::infinity();
    }
  }
}

void spread_slots(int64_t num_tokens, int64_t few, int64_t slots, int32_t* ids, float* weights) {
  for (int64_t token = num_tokens - 1; token >= 0; --token) {
    std::copy_backward(ids + token * few, ids + (token + 1) * few, ids + token * slots + few);
    std::copy_backward(weights + token * few, weights + (token + 1) * few,
                       weights + token * slots + few);
    std::fill_n(ids + token * slots + few, slots - few, -1);
    std::fill_n(weights + token * slots + few, slots - few, 0.0F);
  }
}

void keep_first_slots(int64_t num_tokens, int64_t slots, int64_t few, int32_t* ids) {
  for (int64_t token = 1; token < num_tokens; ++token) {
    std::copy_n(ids + token * slots, few, ids + token * few);
  }
}

void drop_last_slots(int64_t num_tokens, int64_t slots, int64_t few, int32_t* ids, float* weights) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::fill_n(ids + token * slots + few, slots - few, -1);
    std::fill_n(weights + token * slots + few, slots - few, 0.0F);
  }
}

void drop_banned(int64_t num_tokens, int64_t slots, const Banned& banned, int32_t* ids,
                 float* weights) {
  for (int64_t index = 0; index < num_tokens * slots; ++index) {
    if (ids[index] < 0 || !banned.is(index / slots, ids[index])) continue;
    ids[index] = -1;
    weights[index] = 0;
  }
}

bool bans_leave_groups(const MoeSpec& spec) {
  const RouterSpec& router = spec.router;
  return router.num_groups > 1 && router.topk_groups < router.num_groups &&
         router.group_mask == GroupMask::kNegInf;
}

void drop_weightless(int64_t num_tokens, int64_t slots, int32_t* ids, const float* weights) {
  for (int64_t index = 0; index < num_tokens * slots; ++index) {
    if (weights[index] == 0) ids[index] = -1;
  }
}

MoeSpec with_fewer_choices(const MoeSpec& spec, int64_t top_k) {
  MoeSpec fewer = spec;
  const RouterRow* row = find_router(spec.router.name);
  if (row != nullptr && row->keep_choices != nullptr) row->keep_choices(fewer, top_k);
  fewer.top_k = top_k;
  return fewer;
}

bool recalls_choices(const MoeSpec& spec) {
  const RouterRow* row = find_router(spec.router.name);
  return row != nullptr && row->recalls != nullptr && row->recalls(spec);
}

FewerChoices::FewerChoices(MoeSpec spec, Make make)
    : spec_(std::move(spec)),
      make_(std::move(make)),
      routers_(static_cast<size_t>(std::max<int64_t>(spec_.top_k, 0))) {}

const Router& FewerChoices::of(int64_t top_k, size_t scratch_bytes, int32_t workers) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Router>& router = routers_.at(static_cast<size_t>(top_k - 1));
  if (router == nullptr) {
    std::unique_ptr<Router> made = make_(with_fewer_choices(spec_, top_k));
    const size_t needed = made->scratch_bytes(workers);
    if (needed > scratch_bytes) {
      throw Error(
          ErrorCode::kUnsupported,
          {.what = "router " + spec_.router.name + " asks for more memory to choose " +
                   std::to_string(top_k) + " experts than to choose " + std::to_string(spec_.top_k),
           .tensor = "top_k",
           .found = std::to_string(needed) + " bytes",
           .limit = std::to_string(scratch_bytes)});
    }
    router = std::move(made);
  }
  return *router;
}

}  // namespace conclave::inline v0::routing
