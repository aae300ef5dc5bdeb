// How a rank waits for messages until a deadline, whatever its transport can wait for.
#pragma once

#include <cstdint>
#include <mutex>

namespace conclave::inline v0::comm {

class MessagePort;

// Waits first for other threads only, later for longer, so that ranks that share a core do not take
// it from the one they wait for.
void rest_by_the_clock(int64_t round) noexcept;

class Pause {
 public:
  Pause() = default;
  explicit Pause(MessagePort& port) : port_(&port) {}
  // Gives up the lock for a moment.
  void without(std::unique_lock<std::mutex>& lock);

 private:
  MessagePort* port_ = nullptr;
  int64_t rounds_ = 0;
};

}  // namespace conclave::inline v0::comm
