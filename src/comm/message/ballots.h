// A word that is written once, kept by ranks that share no memory. Each has a cell, which it writes
// at every other rank and reads where it lies itself. Ranks that want to settle the word begin
// ballots: of two at once at least one sees the other, and one that comes later finds what an
// earlier one may have settled and settles the same. No rank need answer: what a write needs is
// that the cell lies with every rank that may still act, be it stopped.
#pragma once

#include "comm/survivors.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace conclave::inline v0::comm {

struct WordCell {
  uint64_t promised = 0;  // the last ballot that its rank has begun; 0: none
  uint64_t accepted = 0;  // the ballot in which it wrote `value`; 0: none
  bool is_settled = false;
  Present value = {};
};

// One rank's part. Pure: whoever calls it carries the cells.
class Ballots {
 public:
  enum class Outcome : uint8_t { kWrite, kLost, kSettled };

  Ballots(int32_t me, int32_t ranks);

  // Cells of a rank come in the order in which it has written them.
  void hear(int32_t from, const WordCell& cell);
  // Begins a ballot for `mine`. The cell is to be written then.
  void begin(const Present& mine);
  // To be called when the cell lies with every rank that may still act, and after all that lay
  // here by then has been heard. kWrite: the cell has changed and is to be written again. kLost:
  // another rank's ballot has come later, so that this one is over.
  Outcome is_written();

  const WordCell& cell() const { return cells_[me_]; }
  const std::optional<Present>& settled() const { return settled_; }

 private:
  bool is_overtaken() const;

  size_t me_;
  std::vector<WordCell> cells_;  // [ranks] as they lie here
  Present mine_;
  std::optional<Present> settled_;
};

}  // namespace conclave::inline v0::comm
