// Ranks of one layer must have these values in common, each with a name: any engine lists its own,
// and one comparison serves all.
#pragma once

#include "conclave/comm.h"
#include "conclave/layer.h"
#include "conclave/spec.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

struct AgreedValue {
  std::string name;   // as an error calls it
  int64_t value = 0;  // the value itself, or a hash of several
};

// A member that ranks need not have in common, with all of its own if it is a struct.
struct FieldNotCompared {
  std::string_view name;  // as for_each_field has it: "options.kernel"
  const char* why;
};
std::span<const FieldNotCompared> fields_not_compared();

// Lists every member of spec, options and split that is compared, by its name; an engine adds what
// its plan made of them.
std::vector<AgreedValue> values_to_agree(const MoeSpec& spec, const LayerOptions& options,
                                         const ParallelSpec& parallel);

// Collective. Throws CommError(kCommMismatch) naming a rank and the first value that differs, on
// every rank. Ranks of another version, or with values of other names, are told apart first.
void compare_values(std::span<const AgreedValue> mine, Communicator& communicator,
                    const char* phase = "create: agree on the plan");

}  // namespace conclave::inline v0
