#include "routing/oracle.h"

#include "routing/topk/topk.h"

namespace conclave::inline v0::routing {

ReferenceChoice topk_oracle(const MoeSpec& spec, const ReferenceToken& token) {
  return oracle::choose_and_weigh(spec, token, token.given_ids);
}

}  // namespace conclave::inline v0::routing
