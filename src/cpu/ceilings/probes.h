// Lists which loops measure which instruction set.
#pragma once

#include "cpu/ceilings/probe_functions.h"
#include "cpu/isa.h"

#include <span>

namespace conclave::inline v0::cpu::ceilings {

struct RateProbe {
  Isa isa;
  Arithmetic arithmetic;
  const RateLoop* loop;
  bool (*also_needs)() = nullptr;  // beyond the instruction set; null: nothing
};

// Sorted by instruction set, ascending.
std::span<const RateProbe> rate_probes() noexcept;
// Uses the widest loads that `isa` allows.
const ReadFunctions& read_functions_for(Isa isa) noexcept;

}  // namespace conclave::inline v0::cpu::ceilings
