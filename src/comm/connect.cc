#include "comm/communicator.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <string>
#include <string_view>

namespace conclave::inline v0 {
namespace {

// Both are given, or both left to the transport's launcher.
void check_rank(const ConnectOptions& options) {
  const bool from_launcher = options.rank == -1 && options.size == 0;
  if (from_launcher || (options.rank >= 0 && options.rank < options.size)) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "no rank of this number in the group",
               .tensor = "rank",
               .expected = "between 0 and size - 1, or -1 with size 0 for the launcher's",
               .found = std::to_string(options.rank) + " of " + std::to_string(options.size)});
}

void check_bootstrap(const ConnectOptions& options) {
  const Communicator* const before = options.bootstrap;
  if (before == nullptr || options.size == 0) return;
  if (before->rank() == options.rank && before->size() == options.size) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "the ranks that connect are those of the bootstrap communicator",
               .tensor = "bootstrap",
               .expected = std::to_string(options.rank) + " of " + std::to_string(options.size),
               .found = std::to_string(before->rank()) + " of " + std::to_string(before->size())});
}

}  // namespace

std::unique_ptr<Communicator> connect(std::string_view transport, const ConnectOptions& options) {
  const comm::CommunicatorRow& row = comm::communicator_catalog().find(transport, "transport");
  check_rank(options);
  check_bootstrap(options);
  if (const Support support = row.supports(options); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "cannot connect by transport " + std::string(transport),
                 .found = support.reason()});
  }
  return row.connect(options);
}

std::vector<TransportInfo> transports() {
  std::vector<TransportInfo> infos;
  for (const comm::CommunicatorRow& row : comm::communicator_catalog().rows()) {
    const Support support = row.supports({});
    TransportInfo& info = infos.emplace_back();
    info.name = row.name;
    info.usable = static_cast<bool>(support);
    info.reason = support ? std::string(row.ranks) : support.reason();
    if (support && row.library != nullptr) info.reason += ", by " + row.library();
    info.launch_variables.assign(row.launch_variables.begin(), row.launch_variables.end());
    info.meets_by_exchange = row.meets_by_exchange;
    info.device_kind = row.device_kind;
  }
  return infos;
}

std::vector<std::string> launch_command(std::string_view transport, int32_t ranks) {
  const comm::CommunicatorRow& row = comm::communicator_catalog().find(transport, "transport");
  if (const Support support = row.supports({}); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "cannot start ranks for transport " + std::string(transport),
                 .found = support.reason()});
  }
  if (ranks < 1) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a group needs ranks",
                                              .tensor = "ranks",
                                              .expected = "at least 1",
                                              .found = std::to_string(ranks)});
  }
  return row.launch == nullptr ? std::vector<std::string>() : row.launch(ranks);
}

}  // namespace conclave::inline v0
