// Traces that are drawn: of a rule of choices, a seed, and how much a token resembles the one
// before it. The same arguments give the same ids, layer by layer.
#pragma once

#include "trace/routing_trace.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace conclave::tool {

enum class TraceRule : uint8_t {
  kUniform,  // k distinct experts, all equally likely
  kZipf,     // the expert of rank r weighs 1 / r^exponent
  kHot,      // a share of the choices falls on a few experts, the rest on the others
  kOne,      // all tokens have the same k experts
};

struct TraceChoice {
  TraceRule rule = TraceRule::kUniform;
  double exponent = 1;
  int64_t hot_experts = 0;
  double hot_share = 0;
};
// Parses "uniform", "zipf" or "zipf:1.2", "one", "hot:8:0.5" (8 experts have half of the choices).
// Throws Error(kInvalidArgument) naming --routing.
TraceChoice parse_trace_choice(std::string_view text);

struct SyntheticTraceOptions {
  TraceChoice choice;
  std::string text = "uniform";  // as the rule was given
  uint64_t seed = 0;
  // The chance that a choice is the one that the token before had in the same place, in [0, 1).
  double correlation = 0;
};

class SyntheticTrace final : public RoutingTrace {
 public:
  // Which experts are hot differs from layer to layer. Of `info` the batches are made here: one.
  // Throws Error(kInvalidArgument): hot experts that are none or all of them, fewer experts than
  // choices.
  SyntheticTrace(TraceInfo info, SyntheticTraceOptions options);

  std::vector<int32_t> ids(size_t position) const override;
  std::string describe() const override;

 private:
  SyntheticTraceOptions options_;
};

}  // namespace conclave::tool
