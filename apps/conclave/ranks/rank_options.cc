#include "ranks/rank_options.h"

#include "conclave/comm.h"

#include <vector>

namespace conclave::tool {

void add_rank_options(Command& command, RankOptions& options) {
  std::vector<std::string> names;
  for (const TransportInfo& info : transports()) names.push_back(info.name);
  command.number(
      "--ranks", "N", options.ranks, {1, 4096},
      "Split each layer over N ranks (default: those that a launcher has started, or 1)");
  command.choice(
      "--transport", options.transport, names,
      "What ranks are: threads (local), processes (mpi, tcp), or processes with a GPU each "
      "(nccl)");
  command
      .number("--tp", "N", options.tensor_ranks, {1, 4096},
              "Tensor-parallel ranks that share each expert; the groups are expert-parallel")
      .with_default();
  command
      .number("--rank-timeout", "SECONDS", options.timeout_s, {1, 1 << 20},
              "How long a rank waits for another one")
      .with_default();
}

}  // namespace conclave::tool
