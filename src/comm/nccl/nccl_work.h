// Work of NCCL on a thread of its own. Nobody can end what NCCL waits for, and a thread that still
// uses NCCL or CUDA while the process takes them apart ends the process by a signal.
#pragma once

#include "conclave/version.h"

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

namespace conclave::inline v0::comm {

class NcclWork {
 public:
  // The end of the process waits so long for threads that were left.
  static constexpr std::chrono::nanoseconds kExitTime = std::chrono::seconds(2);

  explicit NcclWork(std::function<void()> work);
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;
  // Joins a thread whose work is over, and leaves another one, which the end of the process joins.
  ~NcclWork();

  // False if the work is not over in time.
  bool wait_for(std::chrono::nanoseconds time);

  // Called by the work between two calls of NCCL. Does not return once the process has ended its
  // waiting: there is nothing left that it could call.
  static void go_on();

 private:
  struct State;

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace conclave::inline v0::comm
