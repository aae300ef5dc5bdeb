// --top-k, --ban-experts, --expert-budget: limits of what the tokens of a run choose.
#pragma once

#include "command_line.h"
#include "layer_run.h"

#include "conclave/spec.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace conclave::tool {

struct ChoiceOptions {
  std::optional<int64_t> top_k;
  std::string banned;
  std::optional<int64_t> budget;

  bool any() const { return top_k || !banned.empty() || budget; }
  // Returns "top 4, without experts 0,7, at most 16 experts".
  std::string describe() const;
};
void add_choice_options(Command& command, ChoiceOptions& options);

// The limits for one layer; holds the flags that its input views.
class ChoiceLimitsOfLayer {
 public:
  // Throws Error(kInvalidArgument) naming the option, what it says and the layer's limit.
  ChoiceLimitsOfLayer(const ChoiceOptions& options, const MoeSpec& spec);
  void apply(LayerInput& input) const;

 private:
  int64_t top_k_ = 0;
  int64_t budget_ = 0;
  std::vector<uint8_t> banned_;  // [E + Z]
};

}  // namespace conclave::tool
