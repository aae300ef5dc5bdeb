#include "comm/tcp/exchange.h"

#include "comm/message/message_port.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <sys/random.h>
#include <unistd.h>

namespace conclave::inline v0::comm {
namespace {

constexpr std::string_view kPhase = "connect";
constexpr size_t kMostAddresses = 64;

std::string file_text(const char* path) {
  std::array<char, 128> text{};
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  const ssize_t length = ::read(file, text.data(), text.size());
  ::close(file);
  std::string found(text.data(), length > 0 ? static_cast<size_t>(length) : 0);
  while (!found.empty() && found.back() == '\n') found.pop_back();
  return found;
}

std::string link_text(const char* path) {
  std::array<char, 128> text{};
  const ssize_t length = ::readlink(path, text.data(), text.size());
  return {text.data(), length > 0 ? static_cast<size_t>(length) : 0};
}

Texts over_bootstrap(Communicator& before, const std::string& mine,
                     std::chrono::nanoseconds timeout) {
  const auto gather = [&](std::span<const std::byte> own, std::span<std::byte> all) {
    before.wait(before.begin_all_gather(own, all), std::min(timeout, before.timeout()), kPhase);
  };
  const auto ranks = static_cast<size_t>(before.size());
  const auto bytes = static_cast<int64_t>(mine.size());
  std::vector<int64_t> lengths(ranks);
  gather(std::as_bytes(std::span(&bytes, 1)), std::as_writable_bytes(std::span(lengths)));
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::string padded = mine;
  padded.resize(static_cast<size_t>(longest), ' ');
  std::string all(ranks * padded.size(), ' ');
  gather(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
  Texts texts;
  for (size_t rank = 0; rank < ranks; ++rank) {
    texts.push_back(all.substr(rank * padded.size(), static_cast<size_t>(lengths[rank])));
  }
  return texts;
}

std::optional<int> digit_of(char letter) {
  if (letter >= '0' && letter <= '9') return letter - '0';
  if (letter >= 'a' && letter <= 'f') return letter - 'a' + 10;
  return std::nullopt;
}

std::optional<Token> token_of(std::string_view text) {
  Token token{};
  if (text.size() != 2 * token.size()) return std::nullopt;
  for (size_t i = 0; i < token.size(); ++i) {
    const auto high = digit_of(text[2 * i]);
    const auto low = digit_of(text[2 * i + 1]);
    if (!high || !low) return std::nullopt;
    token[i] = static_cast<std::byte>(*high * 16 + *low);
  }
  return token;
}

// The part of `text` before the next space, which is taken away.
std::string_view take_word(std::string_view& text) {
  const size_t space = std::min(text.find(' '), text.size());
  const std::string_view word = text.substr(0, space);
  text.remove_prefix(std::min(space + 1, text.size()));
  return word;
}

}  // namespace

Texts exchange_texts(const ConnectOptions& options, const std::string& mine) {
  Texts texts = options.exchange ? options.exchange(mine)
                                 : over_bootstrap(*options.bootstrap, mine, options.timeout);
  if (texts.size() == static_cast<size_t>(options.size)) return texts;
  throw Error(ErrorCode::kInvalidArgument, {.what = "an exchange gives the text of every rank",
                                            .tensor = "exchange",
                                            .expected = std::to_string(options.size),
                                            .found = std::to_string(texts.size())});
}

Token make_token() {
  Token token{};
  const ssize_t got = ::getrandom(token.data(), token.size(), 0);
  if (got != static_cast<ssize_t>(token.size())) {
    throw PortFailure(fmt::format("getrandom: {}", std::strerror(errno)), -1);
  }
  return token;
}

std::string to_text(const Card& card) {
  std::string text;
  for (const std::byte part : card.token) text += fmt::format("{:02x}", static_cast<int>(part));
  text += fmt::format(" {}", card.port);
  for (const std::string& address : card.addresses) text += " " + address;
  return text;
}

Card card_of(const std::string& text, int32_t rank) {
  std::string_view rest = text;
  const auto token = token_of(take_word(rest));
  const std::string_view number = take_word(rest);
  Card card;
  const auto [end, problem] =
      std::from_chars(number.data(), number.data() + number.size(), card.port);
  const bool has_port = problem == std::errc() && end == number.data() + number.size();
  while (!rest.empty() && card.addresses.size() <= kMostAddresses) {
    card.addresses.emplace_back(take_word(rest));
  }
  if (!token || !has_port || card.port == 0 || card.addresses.empty() ||
      card.addresses.size() > kMostAddresses) {
    throw CommError(ErrorCode::kCommMismatch, rank, std::string(kPhase),
                    fmt::format("rank {} does not say where it can be reached", rank));
  }
  card.token = *token;
  return card;
}

std::string network_place() {
  const std::string boot = file_text("/proc/sys/kernel/random/boot_id");
  const std::string space = link_text("/proc/self/ns/net");
  // Unknown places are equal to none.
  if (boot.empty() || space.empty()) return "unknown";
  // Copies of a virtual machine have the other two alike.
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("{}/{}/{}", host.data(), boot, space);
}

}  // namespace conclave::inline v0::comm
