// Ranks of one layer must have these values in common, each with a name: any engine lists its own,
// and one comparison serves all.
#pragma once

#include "conclave/comm.h"
#include "conclave/layer.h"
#include "conclave/spec.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

struct AgreedValue {
  std::string_view name;  // as an error calls it; lives as long as the program
  int64_t value = 0;      // the value itself, or a hash of several
};

// Lists what spec, options and split say; an engine adds what its plan made of them.
std::vector<AgreedValue> values_to_agree(const MoeSpec& spec, const LayerOptions& options,
                                         const ParallelSpec& parallel);

// Collective. Throws CommError(kCommMismatch) naming a rank and the first value that differs, on
// every rank. Ranks of another version, or with values of other names, are told apart first.
void compare_values(std::span<const AgreedValue> mine, Communicator& communicator);

}  // namespace conclave::inline v0
