#include "routing/check_spec.h"
#include "routing/softmax_threshold/softmax_threshold.h"

#include <cstdint>
#include <string>

namespace conclave::inline v0::routing {

void check_softmax_threshold(const MoeSpec& spec) { refuse_all_but_softmax(spec.router); }

void draw_softmax_threshold(std::mt19937& generator, MoeSpec& spec) {
  const auto pick = [&](uint32_t count) { return static_cast<int64_t>(generator() % count); };
  spec.num_experts = 1 + pick(64);
  spec.top_k = 1 + pick(static_cast<uint32_t>(spec.num_experts));
  if (pick(4) == 0) return;
  const std::string ratio(kSoftmaxThresholdOptions[0].name);
  spec.router.options[ratio] = static_cast<double>(1 + pick(100)) / 100;
}

}  // namespace conclave::inline v0::routing
