#include "routing/check_spec.h"
#include "routing/sparse_mixer/sparse_mixer.h"

#include "conclave/error.h"

#include <cstdint>
#include <string>

namespace conclave::inline v0::routing {

void check_sparse_mixer(const MoeSpec& spec) {
  refuse_all_but_softmax(spec.router);
  if (spec.top_k == 2) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "MoeSpec.top_k does not fit router " + spec.router.name,
               .found = std::to_string(spec.top_k),
               .limit = "2"});
}

void refuse_sparse_mixer_fields(const RouterSpec& other) {
  UnusedFields(other).must_be("jitter_epsilon", other.jitter_epsilon, {0.0});
}

void limit_sparse_mixer_fields(const RouterSpec& any) {
  check_not_negative("jitter_epsilon", any.jitter_epsilon);
}

void draw_sparse_mixer(std::mt19937& generator, MoeSpec& spec) {
  const uint32_t more = generator() % 3 == 0 ? 3 : 63;
  spec.num_experts = 2 + static_cast<int64_t>(generator() % more);
  spec.top_k = 2;
  spec.router.jitter_epsilon = generator() % 3 == 0 ? 0.0 : 0.01 * double(generator() % 40);
}

}  // namespace conclave::inline v0::routing
