#include "comm/message/ballots.h"

#include <algorithm>

namespace conclave::inline v0::comm {

Ballots::Ballots(int32_t me, int32_t ranks)
    : me_(static_cast<size_t>(me)), cells_(static_cast<size_t>(ranks)) {}

void Ballots::hear(int32_t from, const WordCell& cell) {
  cells_[static_cast<size_t>(from)] = cell;
  if (cell.is_settled) settled_ = cell.value;
}

// Numbers of ballots are different for each rank.
void Ballots::begin(const Present& mine) {
  const auto ranks = static_cast<uint64_t>(cells_.size());
  uint64_t last = 0;
  for (const WordCell& one : cells_) last = std::max(last, one.promised);
  mine_ = mine;
  cells_[me_].promised = (last / ranks + 1) * ranks + me_;
}

bool Ballots::is_overtaken() const {
  const uint64_t own = cells_[me_].promised;
  return std::ranges::any_of(cells_, [own](const WordCell& one) { return one.promised > own; });
}

Ballots::Outcome Ballots::is_written() {
  if (settled_) return Outcome::kSettled;
  if (is_overtaken()) return Outcome::kLost;
  WordCell& own = cells_[me_];
  if (own.accepted != own.promised) {
    const WordCell& latest = *std::ranges::max_element(cells_, {}, &WordCell::accepted);
    own.value = latest.accepted == 0 ? mine_ : Present(latest.value);
    own.accepted = own.promised;
    return Outcome::kWrite;
  }
  own.is_settled = true;
  settled_ = own.value;
  return Outcome::kSettled;
}

}  // namespace conclave::inline v0::comm
