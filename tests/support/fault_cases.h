// The cases of every matrix of faults and phases, and what the ranks that are left say in each,
// whether ranks are threads or processes of some transport.
#pragma once

#include "support/rank_fault.h"

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::testing {

inline constexpr int32_t kFaultRanks = 3;
inline constexpr auto kFaultDeadline = std::chrono::seconds(2);
// Beyond a deadline, on a machine that other programs keep busy.
inline constexpr auto kFaultSlack = std::chrono::seconds(1);

// Each of the faults in each phase where it means something. Victims and replicas take turns.
inline std::vector<FaultCase> fault_cases(std::span<const Fault> faults) {
  std::vector<FaultCase> cases;
  for (const Fault fault : faults) {
    for (const FaultPhase phase :
         {FaultPhase::kCreate, FaultPhase::kAgree, FaultPhase::kDispatch, FaultPhase::kProducts,
          FaultPhase::kCombine, FaultPhase::kSurvivors}) {
      if (!is_possible(fault, phase)) continue;
      const auto number = static_cast<int32_t>(cases.size());
      cases.push_back({.fault = fault,
                       .phase = phase,
                       .victim = number % kFaultRanks,
                       .has_replicas = number % 2 == 0,
                       .deadline = kFaultDeadline});
    }
  }
  return cases;
}

// Each of the faults where rows travel beside products of another micro-batch.
inline std::vector<FaultCase> overlapped_cases(std::span<const Fault> faults) {
  std::vector<FaultCase> cases;
  for (const FaultPhase phase :
       {FaultPhase::kDispatch, FaultPhase::kProducts, FaultPhase::kCombine}) {
    for (const Fault fault : faults) {
      const auto number = static_cast<int32_t>(cases.size());
      cases.push_back({.fault = fault,
                       .phase = phase,
                       .victim = number % kFaultRanks,
                       .has_replicas = number % 2 == 0,
                       .overlaps = true,
                       .deadline = kFaultDeadline});
    }
  }
  return cases;
}

inline std::string name_of(const FaultCase& c) {
  return to_string(c.fault) + "_" + to_string(c.phase) + (c.overlaps ? "_overlapped" : "");
}

// Ranks meet an error of their own, or none, in the others.
inline bool names_victim(const FaultCase& c) {
  return c.phase != FaultPhase::kSurvivors && c.fault != Fault::kIsSlow;
}
inline bool ranks_go_on(const FaultCase& c) {
  return c.fault != Fault::kIsSlow || c.phase == FaultPhase::kSurvivors;
}
// It is waited for twice: until the deadline of an operation and until that of the roll call.
inline bool is_silent(const FaultCase& c) {
  return c.fault == Fault::kStops || c.fault == Fault::kNeverCalls;
}

// "0.2": the old ranks of the group that goes on.
inline std::string group_after(const FaultCase& c) {
  const bool with_victim = c.fault == Fault::kDisagrees || c.fault == Fault::kIsSlow;
  std::string text;
  for (int32_t rank = 0; rank < c.ranks; ++rank) {
    if (rank == c.victim && !with_victim) continue;
    text += (text.empty() ? "" : ".") + std::to_string(rank);
  }
  return text;
}

// True if a rank that heard of the fault may say so with this code.
inline bool is_code_of(const FaultCase& c, const std::string& code) {
  switch (c.fault) {
    case Fault::kDies:
      return code == "kCommPeerLost";
    case Fault::kStops:
    case Fault::kNeverCalls:
      return code == "kCommTimeout";
    case Fault::kDisagrees:
      return code == "kCommMismatch";
    case Fault::kThrows:
      // Its layer says so where it has begun; otherwise its communicator is destroyed.
      return code == "kCommAborted" || code == "kCommPeerLost";
    case Fault::kIsSlow:
      return code == "nothing";
  }
  return false;
}

}  // namespace conclave::testing
