// The communicator catalog: the transports over which ranks reach each other.
#pragma once

#include "core/catalog.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

// `connect` makes the communicator of one rank, whose peers may be other processes. `make_group`
// makes those of a whole group at once; null for transports whose ranks are not threads of one
// process.
struct CommunicatorRow {
  std::string_view name;   // "local"
  std::string_view ranks;  // what a rank is: "threads of one process"
  // Says whether this build and this machine can join a group as `options` say.
  Support (*supports)(const ConnectOptions& options);
  std::unique_ptr<Communicator> (*connect)(const ConnectOptions& options);
  std::vector<std::unique_ptr<Communicator>> (*make_group)(const LocalGroupOptions& options);
  // Which library it stands on; null where it needs none.
  std::string (*library)() = nullptr;
  // The words of a command that starts so many ranks of the program behind them on this machine;
  // null where ranks are threads.
  std::vector<std::string> (*launch)(int32_t ranks) = nullptr;
  // A process where one of these is set is a rank that a launcher has started.
  std::span<const std::string_view> launch_variables = {};
  // TransportInfo shows both, and says what they mean.
  bool meets_by_exchange = false;
  std::string_view device_kind = {};
};
Catalog<CommunicatorRow> communicator_catalog();

}  // namespace conclave::inline v0::comm
