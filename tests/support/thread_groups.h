// Groups whose ranks are threads, over every transport that can have them in one process.
#pragma once

#include "conclave/comm.h"

#include <array>
#include <memory>
#include <string_view>
#include <vector>

namespace conclave::testing {

struct ThreadGroups {
  std::string_view name;
  std::vector<std::unique_ptr<Communicator>> (*make)(const LocalGroupOptions& options);
};

// The ranks of a group of "tcp", which tell each other where they are in memory.
std::vector<std::unique_ptr<Communicator>> make_tcp_group(const LocalGroupOptions& options);

inline constexpr std::array kThreadGroups = {ThreadGroups{"local", make_local_group},
                                             ThreadGroups{"tcp", make_tcp_group}};

}  // namespace conclave::testing
