// How much of a core a background copy takes: after each piece it sleeps until the processor time
// of the piece is that part of the time on the clock.
#pragma once

#include <cstdint>

namespace conclave::inline v0 {

class Pace {
 public:
  // `share`: of a core's time, above 0; 1 and more never sleep.
  explicit Pace(double share);
  // Called by the copying thread between pieces.
  void rest();
  bool rests() const { return share_ < 1; }

 private:
  double share_;
  int64_t used_ns_;    // processor time of the thread at the last rest
  int64_t passed_ns_;  // on the clock at its end
};

// Lets other threads of the process come first on a core that they share with this one.
void yield_to_others() noexcept;

}  // namespace conclave::inline v0
