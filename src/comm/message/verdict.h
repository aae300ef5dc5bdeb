// Where the answer of a roll call is settled: once, whoever dies or stops meanwhile.
#pragma once

#include "comm/survivors.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace conclave::inline v0::comm {

// The answer of one roll call, as one rank sees it. No call blocks.
class Verdict {
 public:
  virtual ~Verdict() = default;

  // Nothing while nobody has settled it, as far as this rank knows.
  virtual std::optional<Present> read() = 0;
  // Settles it as `mine`, unless another rank is first. Returns what holds for all as soon as that
  // is sure; until then it is to be called again.
  virtual std::optional<Present> settle(const Present& mine) = 0;

  // Tells the others that this rank has come.
  virtual void come() {}
  // Adds those of whom it knows that they have come or ended.
  virtual void look(RollCall& /*roll*/) {}
  // True if the rank is known to have left the group, by what read has seen.
  virtual bool has_ended(int32_t /*rank*/) { return false; }
  // A rank without which nothing can be settled, or -1.
  virtual int32_t awaited() const { return -1; }
};

// Verdicts of a group, and of the groups that follow it, are made by this.
class VerdictPlace {
 public:
  virtual ~VerdictPlace() = default;
  // The verdict of the roll call after `epoch` others. `members` are the ranks by their numbers in
  // the first group, ascending; this one is members[me]. Null where there is no memory for it.
  virtual std::unique_ptr<Verdict> verdict(uint64_t epoch, const std::vector<int32_t>& members,
                                           int32_t me) = 0;
};

}  // namespace conclave::inline v0::comm
