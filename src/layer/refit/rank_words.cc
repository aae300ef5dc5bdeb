#include "layer/refit/rank_words.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace conclave::inline v0 {
namespace {

// All ranks send as many bytes, whatever they say.
struct Word {
  RankIntent intent = RankIntent::kGoesOn;
  std::array<char, 248> reason{};
};

bool continues_letter(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

// No letter of UTF-8 is cut in two.
std::string_view shortened(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  size_t end = most;
  while (end > 0 && continues_letter(text[end])) --end;
  return text.substr(0, end);
}

std::string text_of(const Word& word) {
  const auto end = std::ranges::find(word.reason, '\0');
  return {word.reason.begin(), end};
}

std::string describe(const Word& word, size_t rank) {
  const std::string reason = text_of(word);
  return fmt::format("rank {} {}{}{}", rank,
                     word.intent == RankIntent::kWithdraws ? "has withdrawn" : "cannot go on",
                     reason.empty() ? "" : ": ", reason);
}

}  // namespace

void exchange_words(RankIntent mine, std::string_view reason, Communicator& communicator,
                    const char* phase) {
  Word word{.intent = mine};
  const std::string_view sent = shortened(reason, word.reason.size() - 1);
  std::ranges::copy(sent, word.reason.begin());
  std::vector<Word> all(static_cast<size_t>(communicator.size()));
  communicator.all_gather(std::as_bytes(std::span(&word, 1)),
                          std::as_writable_bytes(std::span(all)), phase);
  // Withdrawals first: they cannot be mended.
  for (const RankIntent intent : {RankIntent::kWithdraws, RankIntent::kFails}) {
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].intent != intent || rank == static_cast<size_t>(communicator.rank())) continue;
      const auto peer = static_cast<int32_t>(rank);
      const std::string text = describe(all[rank], rank);
      if (intent == RankIntent::kFails) {
        throw CommError(ErrorCode::kCommMismatch, peer, phase, text);
      }
      throw RankWithdrawn(ErrorCode::kCommMismatch, peer, phase, text);
    }
  }
}

void agree_on_failure(const std::exception_ptr& mine, Communicator& communicator,
                      const char* phase) {
  if (!mine) return exchange_words(RankIntent::kGoesOn, {}, communicator, phase);
  try {
    exchange_words(RankIntent::kFails, reason_of(mine), communicator, phase);
  } catch (const CommError&) {
    std::rethrow_exception(mine);
  }
  std::rethrow_exception(mine);
}

std::string reason_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of the application";
  }
}

}  // namespace conclave::inline v0
