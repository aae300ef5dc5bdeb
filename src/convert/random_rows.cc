#include "conclave/convert.h"
#include "conclave/spec.h"
#include "conclave/synthetic.h"

#include <random>

namespace conclave::inline v0 {
namespace {

// Needed by routers that choose by the token's id.
Tensor random_token_ids(int64_t num_tokens, int64_t vocab_size, uint64_t seed) {
  std::mt19937_64 generator(seed);
  Tensor ids(DType::kI32, {num_tokens});
  for (int64_t t = 0; t < num_tokens; ++t) {
    ids.as<int32_t>()[t] = static_cast<int32_t>(generator() % static_cast<uint64_t>(vocab_size));
  }
  return ids;
}

}  // namespace

ComparedRows random_rows(const MoeSpec& spec, int64_t num_tokens, uint64_t seed) {
  ComparedRows rows{.hidden = Tensor(natural_row_dtype(spec), {num_tokens, spec.hidden_size})};
  if (num_tokens > 0) fill_random(rows.hidden.view(), seed);
  if (spec.router.vocab_size > 0) {
    rows.token_ids = random_token_ids(num_tokens, spec.router.vocab_size, seed);
  }
  return rows;
}

}  // namespace conclave::inline v0
