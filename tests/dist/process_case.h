// Groups of processes in which one meets a fault: what the others have written of it.
//
// CONCLAVE_FAULT_TABLE names a file for the times of all cases.
#pragma once

#include "dist/launch.h"
#include "support/fault_cases.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace conclave::testing {

struct RankLine {
  std::string code;
  int32_t peer = -1;
  std::string phase;
  std::string went_on;
  std::string results;
  int64_t begin_ns = 0;
  int64_t error_ns = 0;
  int64_t correct_ns = 0;
};

inline RankLine parse_rank_line(const std::string& line) {
  std::istringstream text(line);
  RankLine rank;
  text >> rank.code >> rank.peer >> rank.phase >> rank.went_on >> rank.results >> rank.begin_ns >>
      rank.error_ns >> rank.correct_ns;
  return rank;
}

// A program that lies elsewhere on the machine of the test is named there.
inline std::string rank_program() {
  const char* const path = std::getenv("CONCLAVE_MATRIX_RANK_PROGRAM");
  return path != nullptr ? path : CONCLAVE_MATRIX_RANK;
}

// One case under way.
class ProcessCase {
 public:
  // `hosts`: each rank takes the others for those of another host.
  ProcessCase(const FaultCase& fault, const std::string& transport, bool hosts = false)
      : fault_(fault),
        launch_(transport, fault.ranks,
                {rank_program(), transport, hosts ? "hosts" : "host", to_string(fault.fault),
                 to_string(fault.phase), std::to_string(fault.victim),
                 fault.has_replicas ? "yes" : "no", fault.overlaps ? "yes" : "no"}) {}

  // Other ranks name the victim, in time, and go on to the bits of one rank.
  void expect_right() {
    SCOPED_TRACE(name_of(fault_));
    for (int32_t number = 0; number < fault_.ranks; ++number) {
      if (number != fault_.victim) expect_rank(number);
    }
    if (fault_.fault == Fault::kNeverCalls) {
      const auto line = launch_.line_of(fault_.victim, kPatience);
      ASSERT_TRUE(line.has_value()) << "hangs\n" << launch_.log();
      EXPECT_EQ(parse_rank_line(*line).went_on, "kCommExcluded") << *line;
    }
    if (fault_.fault == Fault::kStops) launch_.kill_rank(fault_.victim);
    EXPECT_TRUE(launch_.ends_within(std::chrono::seconds(20))) << launch_.log();
  }
  // Valid once a rank has written its line.
  bool had_no_hosts() const { return launch_.number_of("no_hosts") != 0; }

 private:
  static constexpr auto kPatience = std::chrono::seconds(60);

  static int64_t ms(std::chrono::nanoseconds time) { return time.count() / 1'000'000; }

  void expect_rank(int32_t number) {
    SCOPED_TRACE("rank " + std::to_string(number));
    const auto line = launch_.line_of(number, kPatience);
    ASSERT_TRUE(line.has_value()) << "hangs\n" << launch_.log();
    const RankLine rank = parse_rank_line(*line);
    EXPECT_EQ(rank.results, "right") << *line << "\n" << launch_.log();
    const int64_t struck = launch_.number_of("struck");
    const int64_t since = struck != 0 ? struck : rank.begin_ns;
    const int64_t error_ms = (rank.error_ns - since) / 1'000'000;
    const int64_t correct_ms = (rank.correct_ns - since) / 1'000'000;
    if (names_victim(fault_)) {
      EXPECT_TRUE(is_code_of(fault_, rank.code)) << *line;
      EXPECT_EQ(rank.peer, fault_.victim) << *line;
      EXPECT_NE(rank.phase, "-") << *line;
      EXPECT_LE(error_ms, ms(fault_.deadline + kFaultSlack)) << *line;
    }
    if (!ranks_go_on(fault_)) return;
    EXPECT_EQ(rank.went_on, group_after(fault_)) << *line;
    const int64_t most =
        is_silent(fault_) ? ms(2 * fault_.deadline + 2 * kFaultSlack) : ms(fault_.deadline);
    EXPECT_LE(correct_ms, most) << *line;
    if (number == (fault_.victim + 1) % fault_.ranks) add_to_table(error_ms, correct_ms, rank);
  }

  void add_to_table(int64_t error_ms, int64_t correct_ms, const RankLine& rank) const {
    const char* const path = std::getenv("CONCLAVE_FAULT_TABLE");
    if (path == nullptr) return;
    std::ofstream(path, std::ios::app)
        << "| " << to_string(fault_.fault) << " | " << to_string(fault_.phase) << " | "
        << fault_.victim << " | " << (fault_.has_replicas ? "replicas" : "read again") << " | "
        << rank.code << " | " << rank.phase << " | " << error_ms << " | " << rank.went_on << " | "
        << correct_ms << " |\n";
  }

  FaultCase fault_;
  Launch launch_;
};

}  // namespace conclave::testing
