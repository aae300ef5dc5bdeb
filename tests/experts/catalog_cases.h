// Rows of the CPU's catalog as cases of tests.
#pragma once

#include "cpu/isa.h"
#include "experts/catalog.h"

#include <cstddef>
#include <vector>

namespace conclave::testing {

// The places of the rows whose arithmetic `takes` names.
template <class Takes>
std::vector<size_t> catalog_places(const Takes& takes) {
  const auto catalog = experts::host_kernels();
  std::vector<size_t> places;
  for (size_t i = 0; i < catalog.rows().size(); ++i) {
    if (takes(cpu::parse_arithmetic(catalog.rows()[i].arithmetic))) places.push_back(i);
  }
  return places;
}

}  // namespace conclave::testing
