// One process of a group in which one rank meets a fault in some phase of a layer. The others write
// what they heard of it, and how they went on.
//
// mpi_matrix_rank FAULT PHASE VICTIM REPLICAS DIRECTORY
#include "support/rank_fault.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <unistd.h>

namespace conclave {
namespace {

// Written whole or not at all: the one who reads waits for it.
void write(const std::string& path, const std::string& text) {
  { std::ofstream(path + ".new") << text << "\n"; }
  std::rename((path + ".new").c_str(), path.c_str());
}

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
  testing::FaultCase fault{.fault = testing::fault_of(words[1]),
                           .phase = testing::phase_of(words[2]),
                           .victim = std::atoi(words[3]),
                           .has_replicas = std::string(words[4]) == "yes"};
  const std::string directory = words[5];
  auto communicator = connect("mpi", {.timeout = fault.deadline});
  const std::string number = std::to_string(communicator->rank());
  write(directory + "/pid." + number, std::to_string(::getpid()));
  fault.strike = [&](testing::Fault how) {
    write(directory + "/struck", std::to_string(testing::steady_ns()));
    ::kill(::getpid(), how == testing::Fault::kDies ? SIGKILL : SIGSTOP);
  };
  std::string line;
  try {
    line = line_of(testing::run_fault(std::move(communicator), fault));
  } catch (const std::exception& error) {
    line = "threw " + one_word(error.what());
  }
  write(directory + "/rank." + number, line);
  return 0;
}

}  // namespace
}  // namespace conclave

int main(int, char** words) { return conclave::run(words); }
