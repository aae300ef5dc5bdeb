// Lets forwards through side by side, and keeps them out while weights change hands. Whoever closes
// it comes before forwards that arrive later, so that a busy layer cannot keep a commit waiting.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace conclave::inline v0 {

class ForwardGate {
 public:
  ForwardGate();

  // A forward holds it from its first look at the weights to its last.
  class Pass {
   public:
    explicit Pass(ForwardGate& gate) : gate_(gate) { gate_.enter(); }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    ~Pass() { gate_.leave(); }

   private:
    ForwardGate& gate_;
  };

  // No forward is under way while it lives.
  class Closed {
   public:
    explicit Closed(ForwardGate& gate) : gate_(gate) { gate_.close(); }
    Closed(const Closed&) = delete;
    Closed& operator=(const Closed&) = delete;
    ~Closed() { gate_.open(); }

   private:
    ForwardGate& gate_;
  };

 private:
  // Both throw Error(kForked) where they would wait for a thread of the parent process.
  void enter();
  void close();
  void leave() noexcept;
  void open() noexcept;
  void check_process() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t under_way_ = 0;
  bool closed_ = false;
  const uint64_t fork_count_;
};

}  // namespace conclave::inline v0
