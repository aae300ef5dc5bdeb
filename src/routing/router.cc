#include "routing/router.h"

namespace conclave::inline v0 {

size_t Router::scratch_bytes(int32_t /*workers*/) const { return 0; }

namespace routing {

const RouterRow* find_router(std::string_view name) noexcept {
  for (const RouterRow& row : router_catalog().rows()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

RouterTraits router_traits(const MoeSpec& spec) {
  const RouterRow* row = find_router(spec.router.name);
  RouterTraits traits = row != nullptr ? row->traits : kCustomTraits;
  for (const SizedRouterTensor& own : router_tensors_of(spec)) {
    if (own.tensor->is_by_token_id) traits.num_token_ids = own.size.rows;
  }
  return traits;
}

double option_of(const RouterSpec& router, const RouterOption& option) {
  const auto found = router.options.find(std::string(option.name));
  return found != router.options.end() ? found->second : option.value;
}

bool is_default_router(const MoeSpec& spec) {
  return std::string_view(spec.router.name) == RouterSpec().name;
}

std::string routers_with(bool RouterTraits::*trait) {
  std::string names;
  for (const RouterRow& row : router_catalog().rows()) {
    if (row.traits.*trait) names += std::string(row.name) + ", ";
  }
  return names + "or a router of the application";
}

ReferenceChoice route_reference(const MoeSpec& spec, const ReferenceToken& token) {
  if (const RouterRow* row = find_router(spec.router.name)) return row->oracle(spec, token);
  throw Error(ErrorCode::kUnsupported,
              {.what = "the reference does not know this router", .found = spec.router.name});
}

}  // namespace routing
}  // namespace conclave::inline v0
