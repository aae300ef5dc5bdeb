// Verdicts of ranks on any hosts: the word that is written once lies with the ranks themselves, and
// its cells travel over lines.
#pragma once

#include "comm/message/verdict.h"
#include "comm/tcp/line.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace conclave::inline v0::comm {

// The lines of one rank to those of its first group.
class Lines final : public VerdictPlace, public std::enable_shared_from_this<Lines> {
 public:
  // One for each rank; that of the rank itself is none.
  explicit Lines(std::vector<Line> lines);
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;
  ~Lines() override;

  std::unique_ptr<Verdict> verdict(uint64_t epoch, const std::vector<int32_t>& members,
                                   int32_t me) override;
  Line& at(int32_t member) { return lines_[static_cast<size_t>(member)]; }
  // True in a child of the process: the connections are not the child's.
  bool is_inherited() const noexcept;

 private:
  std::vector<Line> lines_;
  int64_t pid_;
};

}  // namespace conclave::inline v0::comm
