#include "routing/check_spec.h"
#include "routing/hash/hash.h"

#include <cstdint>

namespace conclave::inline v0::routing {

void check_hash(const MoeSpec& spec) {
  refuse_choosing(spec.router);
  check_range("vocab_size", spec.router.vocab_size, 1, kMaxVocab);
}

void refuse_hash_fields(const RouterSpec& other) {
  UnusedFields(other).must_be("vocab_size", other.vocab_size, {int64_t{0}});
}

void draw_hash(std::mt19937& generator, MoeSpec& spec) {
  const auto pick = [&](uint32_t count) { return static_cast<int64_t>(generator() % count); };
  RouterSpec& router = spec.router;
  spec.num_experts = 1 + pick(40);
  spec.top_k = 1 + pick(static_cast<uint32_t>(spec.num_experts));
  router.vocab_size = 1 + pick(60);
  router.score = static_cast<RouterScore>(pick(4));
  router.order = static_cast<RouterOrder>(pick(2));
  router.soft_cap = pick(4) == 0 ? 5.0 : 0.0;
  router.renormalize = pick(2) == 0 ? Renormalize::kSum : Renormalize::kNone;
  router.scale = pick(2) == 0 ? 1.0 : 2.5;
  router.has_expert_scale = pick(3) == 0;
  router.has_global_scale = pick(3) == 0;
}

}  // namespace conclave::inline v0::routing
