// The router catalog: what a spec and a call must bring, and from names to Router objects and the
// oracle.
#pragma once

#include "core/catalog.h"
#include "routing/router_tensors.h"

#include "conclave/error.h"
#include "conclave/routing.h"
#include "conclave/spec.h"

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::routing {

// A router may read ForwardArgs::token_ids, or need them.
enum class TokenIds : uint8_t {
  kUnused,
  kRead,    // if they are given
  kNeeded,  // unless choices are given
};

// The traits say what a router reads of a spec and needs of a call. The defaults are those of a
// router that reads logits and the fields that every router has.
struct RouterTraits {
  bool reads_logits = true;
  TokenIds token_ids = TokenIds::kUnused;
  bool chooses_zero_experts = false;
  bool weighs_shared = false;  // for SharedMode::kRouterWeight: the logits have S columns more
  // The router looks up ids below this number; 0: it has no such limit. No row says it:
  // router_traits(spec) finds it among the row's tensors.
  int64_t num_token_ids = 0;
};
// A router of the application is asked for nothing and refused nothing.
inline constexpr RouterTraits kCustomTraits{.token_ids = TokenIds::kRead};

// One token's input to the oracle.
struct ReferenceToken {
  const double* logits = nullptr;      // [num_logits(spec)]; NaN compares as -inf
  const int32_t* given_ids = nullptr;  // [k]: weigh these instead of choosing
  int64_t token_id = 0;                // for routers that choose by token ids
  int64_t number = 0;                  // number in the call, for routers that read no logits
  const uint8_t* banned = nullptr;     // [E + Z], as RouterInput has it
  int64_t table_columns = 0;           // likewise
  RouterWeights weights = {};
};
struct ReferenceChoice {
  std::vector<int32_t> ids;            // [k]
  std::vector<double> weights;         // [k]
  std::vector<double> shared_weights;  // [S], for routers that weigh shared experts
  bool usable = true;                  // false if no logit is finite or +Inf
};

// A number that only this router reads, RouterSpec::options[name].
struct RouterOption {
  std::string_view name;
  double value = 0;  // if the spec does not name it
  double low = 0;
  double high = 0;
};

struct DeviceRouterRow;

struct RouterRow {
  std::string_view name;
  RouterTraits traits;
  std::span<const RouterOption> options = {};
  std::span<const RouterTensor> tensors = {};  // those that only this router reads
  // Checks what RouterTraits cannot say, for a spec whose other fields have been checked. Throws
  // Error(kInvalidArgument) naming the field, its value and the limit.
  void (*check)(const MoeSpec& spec);
  // Refuses the spec of another router that sets a field of RouterSpec which only this one reads: a
  // field that changes nothing is a misunderstanding. Null: it has no such fields.
  void (*refuse_own_fields)(const RouterSpec& other) = nullptr;
  // Checks the range of these fields in any spec: a router of the application may read them, too.
  void (*limit_own_fields)(const RouterSpec& any) = nullptr;
  // True if choices are looked up in a table or a record, where a banned expert has no substitute.
  // Null: they are never.
  bool (*recalls)(const MoeSpec& spec) = nullptr;
  // Cuts values of the spec that have a column for each choice to the first `top_k`, before top_k
  // itself is set. Null: there are none.
  void (*keep_choices)(MoeSpec& spec, int64_t top_k) = nullptr;
  Support (*supports)(const MoeSpec& spec);
  std::unique_ptr<Router> (*make)(const MoeSpec& spec);
  // The rule in float64, plain and independent of the router's code.
  ReferenceChoice (*oracle)(const MoeSpec& spec, const ReferenceToken& token);
  // Sets what the rule reads, at random, to values that validate() accepts. Tests call it with
  // sizes of matrices and the name set.
  void (*draw)(std::mt19937& generator, MoeSpec& spec);
  const DeviceRouterRow* device =
      nullptr;  // routing/cuda/device_router.h; null: none in this build
};
Catalog<RouterRow> router_catalog();

// The row of this name, or null: a router of the application, or none.
const RouterRow* find_router(std::string_view name) noexcept;
RouterTraits router_traits(const MoeSpec& spec);
// True if the spec leaves RouterSpec::name as it is: its calls may bring their own routing, and no
// router is asked for.
bool is_default_router(const MoeSpec& spec);
double option_of(const RouterSpec& router, const RouterOption& option);
// "a, b, or a router of the application": the rows that have the trait, for messages.
std::string routers_with(bool RouterTraits::*trait);

// Runs the oracle of the spec's router. Throws Error(kUnsupported) for one of the application.
ReferenceChoice route_reference(const MoeSpec& spec, const ReferenceToken& token);

}  // namespace conclave::inline v0::routing
