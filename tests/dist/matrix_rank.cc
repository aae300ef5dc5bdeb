// One process of a group in which one rank meets a fault in some phase of a layer. The others write
// what they heard of it, and how they went on.
//
// matrix_rank TRANSPORT HOSTS FAULT PHASE VICTIM REPLICAS OVERLAPS DIRECTORY
#include "dist/group_rank.h"
#include "support/rank_fault.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <unistd.h>

namespace conclave {
namespace {

using testing::FaultCase;
using testing::join_group;
using testing::write_whole;

std::string one_word(std::string text) {
  std::ranges::replace(text, ' ', '_');
  return text.empty() ? "-" : text;
}

std::string line_of(const testing::FaultReport& report) {
  return report.code + " " + std::to_string(report.peer) + " " + one_word(report.phase) + " " +
         one_word(report.went_on) + " " + (report.is_right ? "right" : "wrong") + " " +
         std::to_string(report.begin_ns) + " " + std::to_string(report.error_ns) + " " +
         std::to_string(report.correct_ns);
}

int run(char** words) {
  const std::string transport = words[1];
  const bool on_hosts = std::string(words[2]) == "hosts";
  FaultCase fault{.fault = testing::fault_of(words[3]),
                  .phase = testing::phase_of(words[4]),
                  .victim = std::atoi(words[5]),
                  .has_replicas = std::string(words[6]) == "yes",
                  .overlaps = std::string(words[7]) == "yes"};
  const std::string directory = words[8];
  std::unique_ptr<Communicator> first;
  if (on_hosts) {
    // MPI asks for its host when it is initialised, and must find one.
    if (transport == "mpi") first = join_group(transport, directory, fault.deadline);
    if (!testing::move_to_host("conclave-" + std::to_string(::getpid()))) {
      write_whole(directory + "/no_hosts", "1");
    }
  }
  auto communicator = join_group(transport, directory, fault.deadline);
  first.reset();
  const std::string number = std::to_string(communicator->rank());
  write_whole(directory + "/pid." + number, std::to_string(::getpid()));
  fault.strike = [&](testing::Fault how) {
    write_whole(directory + "/struck", std::to_string(testing::steady_ns()));
    ::kill(::getpid(), how == testing::Fault::kDies ? SIGKILL : SIGSTOP);
  };
  std::string line;
  try {
    line = line_of(testing::run_fault(std::move(communicator), fault));
  } catch (const std::exception& error) {
    line = "threw " + one_word(error.what());
  }
  write_whole(directory + "/rank." + number, line);
  return 0;
}

}  // namespace
}  // namespace conclave

int main(int, char** words) { return conclave::run(words); }
