// One rank of a layer that meets a fault in some phase, and goes on with those that are left. The
// same for ranks of threads and of processes.
#pragma once

#include "conclave/comm.h"
#include "conclave/error.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace conclave::testing {

enum class Fault : uint8_t { kDies, kStops, kThrows, kDisagrees, kNeverCalls, kIsSlow };
enum class FaultPhase : uint8_t { kCreate, kAgree, kDispatch, kProducts, kCombine, kSurvivors };
std::string to_string(Fault fault);
std::string to_string(FaultPhase phase);
Fault fault_of(const std::string& name);
FaultPhase phase_of(const std::string& name);

struct FaultCase {
  Fault fault = Fault::kThrows;
  FaultPhase phase = FaultPhase::kAgree;
  int32_t victim = 0;
  bool has_replicas = false;  // every expert is on two ranks, so that nothing is read again
  bool overlaps = false;      // each call is two micro-batches
  int32_t ranks = 3;
  std::chrono::nanoseconds deadline = std::chrono::seconds(2);
  // How the victim dies or stops; threads cannot. Called once.
  std::function<void(Fault)> strike = {};
};

// For messages of a failing case.
inline void PrintTo(const FaultCase& fault, std::ostream* out) {
  *out << to_string(fault.fault) << " in " << to_string(fault.phase)
       << (fault.overlaps ? ", micro-batches" : "");
}

struct FaultReport {
  std::string code = "nothing";  // the error's, and what it names
  int32_t peer = -1;
  std::string phase = "-";
  // Times by std::chrono::steady_clock, which processes of a host share. 0: it did not happen.
  int64_t begin_ns = 0;  // when the call began that meets the fault
  int64_t error_ns = 0;
  int64_t correct_ns = 0;     // the first forward after it with the bits of one rank
  std::string went_on = "-";  // "0.2": the old ranks of the new group; or the code that kept it out
  bool is_right = false;      // results before and after have the bits of one rank
};

int64_t steady_ns();

// Runs the case on this rank: creates a layer, runs it, meets the fault, goes on. The victim's
// report is what it has when it is left out. Throws what the case has no place for.
FaultReport run_fault(std::unique_ptr<Communicator> communicator, const FaultCase& fault);

// True if the case means something: ranks disagree where they exchange something.
bool is_possible(Fault fault, FaultPhase phase);

}  // namespace conclave::testing
