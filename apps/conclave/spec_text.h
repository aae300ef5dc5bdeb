// Describes a layer in words, for tables and JSON.
#pragma once

#include "conclave/spec.h"

#include <string>
#include <string_view>

namespace conclave::tool {

// Returns "5632 gated" or "2 x 512 slots"; "-" without shared experts.
std::string shared_text(const SharedExpertSpec& shared);
// Returns "sigmoid_gate".
std::string_view shared_mode_name(SharedMode mode);
// Returns "topk sigmoid groups 4/8 renorm".
std::string router_text(const RouterSpec& router);
// Returns "sum" or "pnorm".
std::string_view renormalize_name(Renormalize renormalize);
// Returns "BF16", or "F8_E4M3 block 128x128, rows by 128" with what shares a scale in weights and
// rows.
std::string weights_text(const MoeSpec& spec);
// Names the layer's parts besides experts, router and shared experts: "latent 1024, bias"; "-" if
// there are none.
std::string parts_text(const MoeSpec& spec);

}  // namespace conclave::tool
