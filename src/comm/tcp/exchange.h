// Ranks tell each other these before they are connected, over whatever else they share.
#pragma once

#include "conclave/comm.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0::comm {

using Texts = std::vector<std::string>;  // one for each rank

// Tells all ranks `mine` and returns what each said, by the `exchange` of the options, else over
// their `bootstrap`. Throws Error(kInvalidArgument) if there are not as many as ranks.
Texts exchange_texts(const ConnectOptions& options, const std::string& mine);

// Who knows it is a rank of the group: a stranger that reaches the port does not.
using Token = std::array<std::byte, 32>;
Token make_token();

// Where a rank can be reached.
struct Card {
  Token token{};
  uint16_t port = 0;
  std::vector<std::string> addresses;
};
std::string to_text(const Card& card);
// Throws CommError(kCommMismatch) naming `rank` for a text that is no card.
Card card_of(const std::string& text, int32_t rank);

// Equal on all processes that reach each other by the loopback, and on no others.
std::string network_place();

}  // namespace conclave::inline v0::comm
