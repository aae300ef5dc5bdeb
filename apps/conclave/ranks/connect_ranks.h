// The groups of a rank that is a process: all ranks, those with the same columns, those with the
// same experts.
#pragma once

#include "ranks/launchers.h"
#include "ranks/rank_options.h"

#include "conclave/comm.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::tool {

// A transport whose ranks this tool starts itself where no launcher has, and which meet over an
// exchange of texts.
struct ProcessTransport {
  std::string name;
  std::string device_kind;  // each rank has a device of it; empty: ranks are on the host
};
// None for threads, and for ranks that another launcher starts.
std::optional<ProcessTransport> find_process_transport(std::string_view name);

struct ConnectedRank {
  // Carries host memory, for what the tool itself exchanges.
  std::unique_ptr<Communicator> all;
  std::unique_ptr<Communicator> experts;
  std::unique_ptr<Communicator> slices;
  std::string device;  // empty: what the user says
};

// Collective over all ranks, as the next two. Without `launched` the ranks are those of the
// transport `host` (mpi).
std::unique_ptr<Communicator> connect_all(const std::optional<LaunchedRank>& launched,
                                          const std::string& host, const RankOptions& options);
// Connects experts and slices over `all`, by the transport.
void connect_groups(const ProcessTransport& transport, const RankOptions& options,
                    ConnectedRank& rank);
// The same for a transport whose launcher has started the ranks and splits them.
void connect_groups(const std::string& transport, const RankOptions& options, ConnectedRank& rank);

}  // namespace conclave::tool
