// A connection between two ranks that roll calls alone use, so that whatever lies unread in others
// is not before their messages: it always has room for them, also at a rank that is stopped.
#pragma once

#include "comm/message/ballots.h"
#include "comm/tcp/socket.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace conclave::inline v0::comm {

// One message of a roll call.
struct LineMessage {
  uint64_t epoch = 0;    // the roll call
  bool is_gone = false;  // its rank has left the group that the roll call is of
  WordCell cell = {};
};

class Line {
 public:
  Line() = default;  // to the rank itself: nothing is sent or comes
  explicit Line(Socket socket);

  void send(const LineMessage& message);
  // Sends what was kept and reads what has come.
  void move();
  // The next message of this roll call, if one has come. Those of earlier ones are dropped, those
  // of later ones stay.
  std::optional<LineMessage> take(uint64_t epoch);

  // All that was sent lies with the other rank's system, which keeps it also while the rank is
  // stopped, or the rank will never read it.
  bool is_confirmed() const noexcept;
  // The other rank's system has ended the connection: no more will come than what is here.
  bool has_ended() const noexcept { return ended_; }
  // Ends the connection for both sides, whatever child processes hold.
  void shut() noexcept;

 private:
  void push();
  void receive();

  Socket socket_;
  std::vector<std::byte> out_;
  std::vector<std::byte> in_;
  bool ended_ = false;
  bool broken_ = false;  // nobody knows what has become of the other side
};

}  // namespace conclave::inline v0::comm
