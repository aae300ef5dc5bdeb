#include "communicator.h"

#include "conclave/error.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

using Seconds = std::chrono::duration<double>;

std::chrono::nanoseconds timeout_of(double seconds) {
  constexpr double kMost = 1e9;  // beyond the life of any job, and far below the type's limit
  if (!(seconds > 0 && seconds <= kMost)) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "a deadline is a number of seconds",
                                              .tensor = "timeout",
                                              .expected = "above 0, at most 1e9",
                                              .found = std::to_string(seconds)});
  }
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(seconds));
}

std::shared_ptr<Communicator> connect_rank(const std::string& transport, int32_t rank, int32_t size,
                                           const std::string& meeting_point, int32_t group,
                                           double timeout) {
  const ConnectOptions options{.rank = rank,
                               .size = size,
                               .meeting_point = meeting_point,
                               .group = group,
                               .timeout = timeout_of(timeout)};
  const nb::gil_scoped_release released;
  return connect(transport, options);
}

std::vector<std::shared_ptr<Communicator>> local_ranks(int32_t num_ranks, double timeout) {
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (auto& rank : make_local_group({.num_ranks = num_ranks, .timeout = timeout_of(timeout)})) {
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

}  // namespace

void bind_communicator(nb::module_& module) {
  nb::class_<Communicator>(module, "Communicator",
                           "One rank of a group of processes or threads. Layers keep it alive.")
      .def_prop_ro("name", [](const Communicator& self) { return std::string(self.name()); })
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("timeout",
                   [](const Communicator& self) { return Seconds(self.timeout()).count(); })
      .def(
          "barrier", [](Communicator& self) { self.barrier("barrier"); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Waits until every rank calls it, at most for the timeout.")
      .def(
          "abort", [](Communicator& self, const std::string& reason) { self.abort(reason); },
          nb::arg("reason"), nb::call_guard<nb::gil_scoped_release>(),
          "Makes every present and later wait of every rank fail. From any thread.");
  module.def("connect", &connect_rank, nb::arg("transport"), nb::arg("rank"), nb::arg("size"),
             nb::arg("meeting_point"), nb::arg("group"), nb::arg("timeout"),
             "Joins this process to a group of ranks.");
  module.def("local_group", &local_ranks, nb::arg("num_ranks"), nb::arg("timeout"),
             "The ranks of a group of threads of this process.");
  module.def(
      "launch_command",
      [](const std::string& transport, int32_t ranks) { return launch_command(transport, ranks); },
      nb::arg("transport"), nb::arg("ranks"), "The words that start ranks on this machine.");
  module.def(
      "transports",
      [] {
        nb::list rows;
        for (const TransportInfo& row : transports()) {
          rows.append(nb::make_tuple(row.name, row.usable, row.reason));
        }
        return rows;
      },
      "Each transport's name, whether it is usable, and why not or what its ranks are.");
}

}  // namespace conclave::python
