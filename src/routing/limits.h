// Limits of one call's choices: fewer slots than the spec has, and experts that are banned. They
// act on what a router reads and on what it has written, so that every router obeys them.
#pragma once

#include "conclave/routing.h"
#include "conclave/spec.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace conclave::inline v0::routing {

// Rows of flags, one for all tokens or one each.
struct Banned {
  const uint8_t* rows = nullptr;  // null: no expert is banned
  int64_t stride = 0;             // 0: one row for all

  bool any() const { return rows != nullptr; }
  bool is(int64_t token, int64_t expert) const { return rows[token * stride + expert] != 0; }
};

// Bans of a call, joined with experts that are left out for all of its tokens.
class ExpertBans {
 public:
  // `left_out` [E + Z].
  ExpertBans(std::vector<uint8_t> left_out, const Banned& banned, int64_t num_tokens);
  Banned banned() const;
  bool by_token() const { return by_token_; }

 private:
  std::vector<uint8_t> flags_;
  int64_t columns_;
  bool by_token_;
};

// Copies `logits` [T, num_logits] with -inf for banned columns; `to` may be `logits`.
void mask_logits(const float* logits, int64_t num_tokens, int64_t num_logits, int64_t num_columns,
                 const Banned& banned, float* to);

// Moves rows of `few` slots at the front of the memory apart to rows of `slots`, the new ones with
// id -1 and weight 0.
void spread_slots(int64_t num_tokens, int64_t few, int64_t slots, int32_t* ids, float* weights);
// The inverse for ids: keeps the first `few` of each row.
void keep_first_slots(int64_t num_tokens, int64_t slots, int64_t few, int32_t* ids);
// Empties the slots from `few` on.
void drop_last_slots(int64_t num_tokens, int64_t slots, int64_t few, int32_t* ids, float* weights);
// Empties the slots of banned experts.
void drop_banned(int64_t num_tokens, int64_t slots, const Banned& banned, int32_t* ids,
                 float* weights);
// True if bans may leave the kept groups of a token fewer experts than it chooses: the router then
// goes on with those of other groups, whose weight is 0.
bool bans_leave_groups(const MoeSpec& spec);
// Empties the slots without weight, which is what such a router's choices beyond its groups are.
void drop_weightless(int64_t num_tokens, int64_t slots, int32_t* ids, const float* weights);

// The same rule for fewer choices.
MoeSpec with_fewer_choices(const MoeSpec& spec, int64_t top_k);

// True if the router looks its choices up, in a table or a record, so that a banned expert has no
// substitute.
bool recalls_choices(const MoeSpec& spec);

// The routers of a spec with fewer choices, each made by the first call that asks for it and kept.
// Calls may run at the same time.
class FewerChoices {
 public:
  using Make = std::function<std::unique_ptr<Router>(const MoeSpec& spec)>;
  FewerChoices(MoeSpec spec, Make make);

  // Needs 1 <= top_k < the spec's. Throws Error(kUnsupported) with the reason where there is no
  // such router, or where it asks for more than `scratch_bytes` for `workers` workers.
  const Router& of(int64_t top_k, size_t scratch_bytes, int32_t workers);

 private:
  MoeSpec spec_;
  Make make_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Router>> routers_;  // that for k at k - 1
};

}  // namespace conclave::inline v0::routing
