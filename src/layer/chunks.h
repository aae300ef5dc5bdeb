// Cuts a call of more tokens than were planned for into as few chunks as possible, of equal size,
// so that no chunk is a small rest that runs at a small chunk's speed.
#pragma once

#include "core/checked.h"

#include "conclave/layer.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace conclave::inline v0 {

// Tokens [begin, begin + count) of the call.
struct TokenChunk {
  int64_t begin = 0;
  int64_t count = 0;
};

// The fewest chunks of at most `max_tokens` tokens that hold `tokens`; 0 for no tokens.
constexpr int64_t num_chunks(int64_t tokens, int64_t max_tokens) {
  return ceil_div(tokens, max_tokens);
}

// How calls are cut where one chunk is to compute while another travels.
struct ChunkRule {
  int64_t most_tokens = 0;                                 // the most in a chunk
  int64_t cut_from = std::numeric_limits<int64_t>::max();  // as many have two chunks at least
};
constexpr int64_t num_chunks(int64_t tokens, const ChunkRule& rule) {
  const int64_t fewest = num_chunks(tokens, rule.most_tokens);
  return tokens >= rule.cut_from ? std::max<int64_t>(fewest, 2) : fewest;
}

// Chunk `index` of `chunks`. Counts differ by at most one and the longer chunks come first: with
// num_chunks() or more chunks none exceeds max_tokens. With more chunks than tokens, as on a rank
// that takes part in its peers' exchanges, the last ones are empty.
constexpr TokenChunk chunk_at(int64_t tokens, int64_t chunks, int64_t index) {
  const int64_t count = tokens / chunks;
  const int64_t longer = tokens % chunks;
  return {.begin = index * count + std::min(index, longer), .count = count + (index < longer)};
}

// The call with every tensor cut to the rows of one chunk, and its strides filled in.
ForwardArgs chunk_of(const ForwardArgs& args, const TokenChunk& chunk);

}  // namespace conclave::inline v0
