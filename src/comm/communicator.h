// The communicator catalog: ways to make a group of ranks.
#pragma once

#include "core/catalog.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <memory>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

// `make_group` makes all communicators of a group whose ranks live in this process.
struct CommunicatorRow {
  std::string_view name;  // "local"
  Support (*supports)(const LocalGroupOptions& options);
  std::vector<std::unique_ptr<Communicator>> (*make_group)(const LocalGroupOptions& options);
};
Catalog<CommunicatorRow> communicator_catalog();

}  // namespace conclave::inline v0::comm
