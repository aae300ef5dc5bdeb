#include "comm/tcp/meeting.h"

#include "comm/message/message_port.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <poll.h>
#include <span>
#include <string>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

// Longer than a packet is lost and sent again, far shorter than a wait for an address that nobody
// has; and for the answer of a process that may be busy.
constexpr auto kConnectTime = 2s;
constexpr auto kAnswerTime = 10s;
// Strangers may knock too.
constexpr size_t kMostGuests = 1024;
constexpr int kPollMs = 5;

// A rank says this to the one it has connected to, which answers with the token of the first.
struct Hello {
  Token token{};  // that of the receiver
  int32_t rank = -1;
  int32_t ranks = 0;
  int32_t lane = 0;
  int32_t lanes = 1;
};
struct Answer {
  Token token{};
};

// A short message of which only a part may have come.
template <class Message>
class Incoming {
 public:
  // True once it is whole. `failed` where the other side has gone.
  bool take_from(const Socket& socket, bool& failed) {
    const int64_t got = read_some(socket.fd(), std::span(bytes_).subspan(held_));
    if (got > 0) held_ += static_cast<size_t>(got);
    failed = got == 0 || (got < 0 && !would_block(errno));
    return held_ == bytes_.size();
  }
  Message message() const {
    Message value;
    std::memcpy(static_cast<void*>(&value), bytes_.data(), sizeof value);
    return value;
  }

 private:
  std::array<std::byte, sizeof(Message)> bytes_;
  size_t held_ = 0;
};

// A new connection has room for a short message.
template <class Message>
bool send_whole(const Socket& socket, const Message& message) {
  const auto bytes = std::as_bytes(std::span(&message, 1));
  return write_some(socket.fd(), bytes, {}) == static_cast<int64_t>(bytes.size());
}

// The way to a rank before this one.
struct Attempt {
  int32_t to = -1;
  int32_t lane = 0;
  size_t address = 0;  // the next to be tried
  Socket socket;
  bool connected = false;
  Incoming<Answer> answer;
  Clock::time_point until;
};
// Somebody who has connected and not said who it is.
struct Guest {
  Socket socket;
  Incoming<Hello> hello;
  Clock::time_point until;
};

class Meeting {
 public:
  Meeting(const Listener& listener, const std::vector<Card>& cards, int32_t rank, int32_t lanes)
      : listener_(listener), cards_(cards), rank_(rank), met_(static_cast<size_t>(lanes)) {
    for (Sockets& lane : met_) lane.resize(cards.size());
    for (int32_t lane = 0; lane < lanes; ++lane) {
      for (int32_t to = 0; to < rank; ++to) {
        Attempt& attempt = attempts_.emplace_back();
        attempt.to = to;
        attempt.lane = lane;
      }
    }
  }

  std::vector<Sockets> run(Clock::time_point until) {
    while (true) {
      for (Attempt& attempt : attempts_) go_on(attempt);
      std::erase_if(attempts_, [&](const Attempt& a) { return at(a.lane, a.to).is_open(); });
      let_in();
      for (Guest& guest : guests_) greet(guest);
      std::erase_if(guests_, [](const Guest& g) { return !g.socket.is_open(); });
      const int32_t missing = first_missing();
      if (missing < 0) return std::move(met_);
      if (Clock::now() >= until) {
        throw CommError(ErrorCode::kCommTimeout, missing, "connect",
                        fmt::format("rank {} did not connect in time", missing));
      }
      rest();
    }
  }

 private:
  Socket& at(int32_t lane, int32_t rank) {
    return met_[static_cast<size_t>(lane)][static_cast<size_t>(rank)];
  }
  int32_t first_missing() {
    for (int32_t lane = 0; lane < static_cast<int32_t>(met_.size()); ++lane) {
      for (int32_t other = 0; other < static_cast<int32_t>(cards_.size()); ++other) {
        if (other != rank_ && !at(lane, other).is_open()) return other;
      }
    }
    return -1;
  }

  void go_on(Attempt& attempt) {
    if (!attempt.socket.is_open()) return begin(attempt);
    if (!attempt.connected) {
      pollfd ready{.fd = attempt.socket.fd(), .events = POLLOUT, .revents = 0};
      if (::poll(&ready, 1, 0) > 0) introduce(attempt);
    } else {
      bool failed = false;
      if (attempt.answer.take_from(attempt.socket, failed)) return accept_answer(attempt);
      if (failed) attempt.socket.close();
    }
    if (Clock::now() >= attempt.until) attempt.socket.close();
  }
  void begin(Attempt& attempt) {
    const Card& card = cards_[static_cast<size_t>(attempt.to)];
    const std::string& address = card.addresses[attempt.address++ % card.addresses.size()];
    attempt.connected = false;
    attempt.answer = {};
    attempt.until = Clock::now() + kConnectTime;
    if (auto socket = begin_connect(address, card.port)) attempt.socket = std::move(*socket);
  }
  void introduce(Attempt& attempt) {
    const Hello hello{.token = cards_[static_cast<size_t>(attempt.to)].token,
                      .rank = rank_,
                      .ranks = static_cast<int32_t>(cards_.size()),
                      .lane = attempt.lane,
                      .lanes = static_cast<int32_t>(met_.size())};
    if (connect_error(attempt.socket) != 0 || !send_whole(attempt.socket, hello)) {
      return attempt.socket.close();
    }
    attempt.connected = true;
    attempt.until = Clock::now() + kAnswerTime;
  }
  void accept_answer(Attempt& attempt) {
    const bool is_the_rank = attempt.answer.message().token == own().token;
    if (is_the_rank) at(attempt.lane, attempt.to) = std::move(attempt.socket);
    attempt.socket.close();
  }

  void let_in() {
    while (guests_.size() < kMostGuests) {
      auto socket = accept_one(listener_);
      if (!socket) return;
      Guest& guest = guests_.emplace_back();
      guest.socket = std::move(*socket);
      guest.until = Clock::now() + kAnswerTime;
    }
  }
  void greet(Guest& guest) {
    bool failed = false;
    if (!guest.hello.take_from(guest.socket, failed)) {
      if (failed || Clock::now() >= guest.until) guest.socket.close();
      return;
    }
    const Hello hello = guest.hello.message();
    const bool is_awaited = hello.token == own().token && hello.rank > rank_ &&
                            hello.ranks == static_cast<int32_t>(cards_.size()) &&
                            hello.rank < hello.ranks && hello.lane >= 0 &&
                            hello.lanes == static_cast<int32_t>(met_.size()) &&
                            hello.lane < hello.lanes;
    if (is_awaited) {
      const auto from = static_cast<size_t>(hello.rank);
      // One that had no answer in time comes again: its last connection counts.
      if (send_whole(guest.socket, Answer{cards_[from].token})) {
        at(hello.lane, hello.rank) = std::move(guest.socket);
      }
    }
    guest.socket.close();
  }

  const Card& own() const { return cards_[static_cast<size_t>(rank_)]; }

  void rest() const {
    std::vector<pollfd> waiting = {{.fd = listener_.socket.fd(), .events = POLLIN, .revents = 0}};
    for (const Attempt& attempt : attempts_) {
      if (!attempt.socket.is_open()) continue;
      const short event = attempt.connected ? POLLIN : POLLOUT;
      waiting.push_back({.fd = attempt.socket.fd(), .events = event, .revents = 0});
    }
    for (const Guest& guest : guests_) {
      waiting.push_back({.fd = guest.socket.fd(), .events = POLLIN, .revents = 0});
    }
    ::poll(waiting.data(), waiting.size(), kPollMs);
  }

  const Listener& listener_;
  const std::vector<Card>& cards_;
  int32_t rank_;
  std::vector<Sockets> met_;  // [lanes]
  std::vector<Attempt> attempts_;
  std::vector<Guest> guests_;
};

}  // namespace

std::vector<Sockets> meet_all(const Listener& listener, const std::vector<Card>& cards,
                              int32_t rank, int32_t lanes, Clock::time_point until) {
  return Meeting(listener, cards, rank, lanes).run(until);
}

}  // namespace conclave::inline v0::comm
