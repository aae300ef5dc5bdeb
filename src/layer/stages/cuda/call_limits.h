// Stages are told of a call's limits by these.
#pragma once

#include "routing/cuda/bans.h"

#include <cstdint>

namespace conclave::inline v0 {

// A whole call has these limits, found once for all of its chunks.
struct CudaCallLimits {
  bool any = false;
  bool reads_own_flags = false;  // the caller's bans lie in device memory
  bool bans_for_all = false;     // the workspace has bans of all tokens
};

// A chunk obeys these. Without any limit it routes in as few launches as it can.
struct CudaLimits {
  int64_t top_k = 0;  // choices of a token; 0: no limits
  routing::DeviceBans banned = {};
  // Experts that the caller's flags leave too few of are missed: nobody looks them up in a table.
  bool misses_choices = false;
  bool drops_weightless = false;

  bool any() const { return top_k != 0; }
};

}  // namespace conclave::inline v0
