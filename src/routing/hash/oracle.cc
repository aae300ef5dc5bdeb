#include "routing/oracle.h"

#include "routing/hash/hash.h"

namespace conclave::inline v0::routing {

ReferenceChoice hash_oracle(const MoeSpec& spec, const ReferenceToken& token) {
  const int32_t* ids = token.given_ids;
  const int64_t columns = token.table_columns != 0 ? token.table_columns : spec.top_k;
  if (ids == nullptr) ids = token.weights.hash_table + token.token_id * columns;
  return oracle::choose_and_weigh(spec, token, ids);
}

}  // namespace conclave::inline v0::routing
