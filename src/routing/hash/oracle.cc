#include "routing/oracle.h"

#include "routing/hash/hash.h"

namespace conclave::inline v0::routing {

ReferenceChoice hash_oracle(const MoeSpec& spec, const ReferenceToken& token) {
  const int32_t* ids = token.given_ids;
  if (ids == nullptr) ids = token.weights.hash_table + token.token_id * spec.top_k;
  return oracle::choose_and_weigh(spec, token, ids);
}

}  // namespace conclave::inline v0::routing
