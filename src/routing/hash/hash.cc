#include "routing/hash/hash.h"

#include "core/dcheck.h"
#include "routing/rows.h"
#include "routing/score.h"
#include "routing/weigh.h"

#include <algorithm>
#include <string>

namespace conclave::inline v0::routing {
namespace {

class HashRouter final : public Router {
 public:
  explicit HashRouter(const MoeSpec& spec)
      : score_(ScoreRule::of(spec.router)),
        weigh_(WeighRule::of(spec)),
        num_experts_(spec.num_experts),
        top_k_(spec.top_k) {}

  size_t scratch_bytes(int32_t workers) const override { return scratch_bytes_of(top_k_, workers); }

  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor& executor) const override {
    CONCLAVE_DCHECK(input.num_tokens == 0 || input.given_ids != nullptr ||
                    (input.token_ids != nullptr && input.weights.hash_table != nullptr));
    return route_rows(input, top_k_, executor, [&](int64_t token, double* scratch) {
      const float* logits = input.logits + token * input.num_logits;
      int32_t* ids = output.topk_ids + token * top_k_;
      std::copy_n(ids_of(input, token), top_k_, ids);
      weigh_ids(score_, weigh_, input.weights, logits, num_experts_, ids, top_k_, scratch,
                output.topk_weights + token * top_k_);
      return has_present(logits, num_experts_);
    });
  }

 private:
  const int32_t* ids_of(const RouterInput& input, int64_t token) const {
    if (input.given_ids != nullptr) return input.given_ids + token * top_k_;
    const int64_t columns = input.table_columns != 0 ? input.table_columns : top_k_;
    return input.weights.hash_table + int64_t{input.token_ids[token]} * columns;
  }

  ScoreRule score_;
  WeighRule weigh_;
  int64_t num_experts_;
  int64_t top_k_;
};

}  // namespace

bool hash_recalls(const MoeSpec&) { return true; }

Support hash_supports(const MoeSpec& spec) {
  if (spec.router.vocab_size >= 1) return Support::yes();
  return Support::no("the table has " + std::to_string(spec.router.vocab_size) +
                     " rows: RouterSpec.vocab_size");
}

std::unique_ptr<Router> make_hash_router(const MoeSpec& spec) {
  return std::make_unique<HashRouter>(spec);
}

}  // namespace conclave::inline v0::routing
