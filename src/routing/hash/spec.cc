#include "routing/check_spec.h"
#include "routing/hash/hash.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace conclave::inline v0::routing {
namespace {

// More rows than any vocabulary has; the product with k stays inside 63 bits.
constexpr int64_t kMaxVocab = int64_t{1} << 30;

}  // namespace

void check_hash(const MoeSpec& spec) {
  refuse_choosing(spec.router);
  check_range("vocab_size", spec.router.vocab_size, 1, kMaxVocab);
}

void refuse_hash_fields(const RouterSpec& other) {
  UnusedFields(other).must_be("vocab_size", other.vocab_size, {int64_t{0}});
}

void limit_hash_fields(const RouterSpec& any) {
  check_range("vocab_size", any.vocab_size, 0, kMaxVocab);
}

void check_hash_table(const MoeSpec& spec, const ConstTensorView& rows, int64_t first_row,
                      const std::string& where) {
  const int64_t slots = rows.shape[1];
  for (int64_t index = 0; index < rows.shape[0] * slots; ++index) {
    const int64_t id = rows.dtype == DType::kI64 ? static_cast<const int64_t*>(rows.data)[index]
                                                 : static_cast<const int32_t*>(rows.data)[index];
    if (id >= 0 && id < spec.num_experts) continue;
    throw Error(ErrorCode::kExpertId,
                {.what = "the hash table names an expert that does not exist, at row " +
                         std::to_string(first_row + index / slots) + ", slot " +
                         std::to_string(index % slots),
                 .tensor = where,
                 .found = std::to_string(id),
                 .limit = "0 to " + std::to_string(spec.num_experts - 1)});
  }
}

void imply_hash(RouterSpec& router, int64_t rows) {
  router.name = "hash";
  router.vocab_size = rows;
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
