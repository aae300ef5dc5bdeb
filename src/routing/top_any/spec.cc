#include "routing/check_spec.h"
#include "routing/top_any/top_any.h"

#include <cmath>
#include <cstdint>
#include <string>

namespace conclave::inline v0::routing {

void check_top_any(const MoeSpec& spec) { refuse_all_but_softmax(spec.router); }

void check_thresholds(const MoeSpec&, const ConstTensorView& rows, int64_t,
                      const std::string& where) {
  Tensor values(DType::kF32, rows.shape);
  convert(rows, values.view());
  for (int64_t expert = 0; expert < rows.shape.num_elements(); ++expert) {
    if (!std::isnan(values.as<float>()[expert])) continue;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "the threshold of expert " + std::to_string(expert) + " is NaN",
                 .tensor = where,
                 .expected = "a number: logits are compared with it"});
  }
}

void draw_top_any(std::mt19937& generator, MoeSpec& spec) {
  const auto pick = [&](uint32_t count) { return static_cast<int64_t>(generator() % count); };
  spec.num_experts = 1 + pick(64);
  spec.top_k = 1 + pick(static_cast<uint32_t>(spec.num_experts));
}

}  // namespace conclave::inline v0::routing
