#include "comm/local/connect_local.h"

#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

constexpr std::string_view kCpu = "cpu";

}  // namespace

Support local_supports(const ConnectOptions& options) {
  if (options.size > 1) {
    return Support::no("its ranks are threads of one process: make_local_group makes all " +
                       std::to_string(options.size));
  }
  if (!options.device.empty() && options.device != kCpu) {
    return Support::no("it carries host memory, not that of " + options.device);
  }
  return Support::yes();
}

std::unique_ptr<Communicator> connect_local(const ConnectOptions& options) {
  auto group = make_local_group({.num_ranks = 1, .timeout = options.timeout});
  return std::move(group.front());
}

}  // namespace conclave::inline v0::comm
