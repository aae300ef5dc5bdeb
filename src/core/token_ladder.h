// Ladders: alternatives for numbers of tokens. A rung serves calls of up to `last_tokens` tokens,
// above those of the rung before; the last one serves calls of the plan's most.
#pragma once

#include "conclave/version.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace conclave::inline v0 {

// Calls of `first` to `last` tokens.
struct CallRange {
  int64_t first = 1;
  int64_t last = 1;
};

// The rung that serves a call of `tokens` tokens.
template <class Rung>
const Rung& rung_for(const std::vector<Rung>& ladder, int64_t tokens) {
  for (const Rung& rung : ladder) {
    if (tokens <= rung.last_tokens) return rung;
  }
  return ladder.back();
}

// Appends a rung; one that `agrees` with the last of the ladder lengthens that one instead.
template <class Rung, class Agrees>
void add_rung(std::vector<Rung>& ladder, Rung rung, const Agrees& agrees) {
  if (!ladder.empty() && agrees(ladder.back(), rung)) {
    ladder.back().last_tokens = rung.last_tokens;
  } else {
    ladder.push_back(std::move(rung));
  }
}

// Visits (rung, tokens) for every rung that serves some of `calls`; `tokens` is its largest call.
template <class Rung, class Visit>
void for_each_rung(const std::vector<Rung>& ladder, const CallRange& calls, Visit visit) {
  for (const Rung& rung : ladder) {
    if (rung.last_tokens < calls.first) continue;
    visit(rung, std::min(rung.last_tokens, calls.last));
    if (rung.last_tokens >= calls.last) break;
  }
}

// Splits the calls of up to `max_tokens` tokens by the rung that serves them.
template <class Rung>
std::vector<CallRange> calls_by_rung(const std::vector<Rung>& ladder, int64_t max_tokens) {
  std::vector<CallRange> ranges;
  int64_t first = 1;
  for_each_rung(ladder, {.first = 1, .last = max_tokens}, [&](const Rung&, int64_t tokens) {
    ranges.push_back({.first = first, .last = tokens});
    first = tokens + 1;
  });
  if (ranges.empty()) ranges.push_back({.first = 1, .last = max_tokens});
  return ranges;
}

}  // namespace conclave::inline v0
