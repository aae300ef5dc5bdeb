// A thread that moves a communicator's messages while the thread that uses it does other work.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace conclave::inline v0::comm {

class MessagePort;

// Starts its thread when it is first woken. The thread then calls `advance` again and again until
// there is nothing to move; between two calls it rests as the port does.
class Background {
 public:
  // `advance` takes the port's lock itself, and returns true while there is more to come.
  Background(MessagePort& port, std::function<bool()> advance)
      : port_(port), advance_(std::move(advance)) {}
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  // Waits for the thread, which `advance` must not keep.
  ~Background();

  // There is something to move. Throws std::system_error where no thread can be had.
  void wake();

 private:
  void run();
  // False at the end.
  bool await_work();

  MessagePort& port_;
  std::function<bool()> advance_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_work_ = false;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace conclave::inline v0::comm
