// The directory by which started ranks tell their starter which process each is, and its end.
#pragma once

#include "exit_code.h"

#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>

namespace conclave::tool {

// Made new, and removed with everything in it. A starter that was killed leaves its own behind,
// with its name: the next one removes those whose starters have ended.
class ReportDirectory {
 public:
  // Throws Error(kFileWrite).
  ReportDirectory();
  ReportDirectory(const ReportDirectory&) = delete;
  ReportDirectory& operator=(const ReportDirectory&) = delete;
  ~ReportDirectory();

  const std::string& path() const { return path_; }
  std::optional<ExitCode> code_of(int32_t rank) const;
  // The process that has said that it is this rank.
  std::optional<pid_t> process_of(int32_t rank) const;
  // Whether it is no later process of that number: a rank's environment has this directory.
  bool is_rank(pid_t pid) const;

 private:
  std::string path_;
};

// In a rank: what the directory's maker reads.
void report_code(const std::string& directory, int32_t rank, ExitCode code);
void report_process(const std::string& directory, int32_t rank);

}  // namespace conclave::tool
