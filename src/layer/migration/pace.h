// How much of a core a background copy takes: after each piece it sleeps in proportion to the
// processor time that the piece took.
#pragma once

#include <cstdint>

namespace conclave::inline v0 {

class Pace {
 public:
  // `share`: of a core's time, above 0; 1 and more never sleep.
  explicit Pace(double share);
  // Called by the copying thread between pieces.
  void rest();

 private:
  double share_;
  int64_t used_ns_;  // processor time of the thread at the last rest
};

// Lets other threads of the process come first on a core that they share with this one.
void yield_to_others() noexcept;

}  // namespace conclave::inline v0
