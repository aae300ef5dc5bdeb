// Threads that use NCCL and CUDA end before the process takes these apart, also where nobody
// destroys what they belong to.
#pragma once

#include "conclave/version.h"

#include <functional>

namespace conclave::inline v0::comm {

class BeforeExit {
 public:
  // `end` is called where the process exits, unless this is destroyed before. Libraries that are
  // loaded by now are still whole then.
  explicit BeforeExit(std::function<void()> end);
  BeforeExit(const BeforeExit&) = delete;
  BeforeExit& operator=(const BeforeExit&) = delete;
  // Waits for a call that is under way.
  ~BeforeExit();

 private:
  friend class Endings;

  std::function<void()> end_;
};

}  // namespace conclave::inline v0::comm
