// How a rank waits for messages until a deadline, whatever its transport can wait for.
#pragma once

#include <cstdint>
#include <mutex>

namespace conclave::inline v0::comm {

class MessagePort;

// Waits first for other threads only, later for longer, so that ranks that share a core do not take
// it from the one they wait for.
void rest_by_the_clock(int64_t round) noexcept;

// While one lives, waits of its thread give the core away from the beginning: work in the
// background has time, and is held to a share of a core that waits on the core would use up.
class PatientWaits {
 public:
  explicit PatientWaits(bool wanted) noexcept;
  PatientWaits(const PatientWaits&) = delete;
  PatientWaits& operator=(const PatientWaits&) = delete;
  ~PatientWaits();

  static bool are_on() noexcept;  // for this thread

 private:
  bool before_;
};

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
