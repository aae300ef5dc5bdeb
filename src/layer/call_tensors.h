// The tensors of a call, each listed once: what cuts, compares or places all of them loops over
// these lists.
#pragma once

#include "conclave/layer.h"

#include <array>

namespace conclave::inline v0 {

struct CallInput {
  const char* name;
  ConstTensorView ForwardArgs::*view;
  bool has_rows = true;  // false: a vector is one for all tokens, which no chunk cuts
};
struct CallOutput {
  const char* name;
  TensorView ForwardArgs::*view;
};

inline constexpr std::array kCallInputs = {
    CallInput{"hidden", &ForwardArgs::hidden},
    CallInput{"router_logits", &ForwardArgs::router_logits},
    CallInput{"topk_ids", &ForwardArgs::topk_ids},
    CallInput{"topk_weights", &ForwardArgs::topk_weights},
    CallInput{"router_input", &ForwardArgs::router_input},
    CallInput{"residual_input", &ForwardArgs::residual_input},
    CallInput{"token_ids", &ForwardArgs::token_ids},
    CallInput{"padding_mask", &ForwardArgs::padding_mask},
    CallInput{"banned_experts", &ForwardArgs::banned_experts, false},
    CallInput{"adapter_ids", &ForwardArgs::adapter_ids},
};

inline constexpr std::array kCallOutputs = {
    CallOutput{"out", &ForwardArgs::out},
    CallOutput{"shared_out", &ForwardArgs::shared_out},
    CallOutput{"captured_logits", &ForwardArgs::captured_logits},
    CallOutput{"captured_ids", &ForwardArgs::captured_ids},
    CallOutput{"captured_weights", &ForwardArgs::captured_weights},
};

}  // namespace conclave::inline v0
