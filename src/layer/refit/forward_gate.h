// Lets forwards through side by side, and keeps them out while weights change hands. Whoever closes
// it comes before forwards that arrive later, so that a busy layer cannot keep a commit waiting. It
// has no lock that a thread of the parent could hold for ever in a forked child.
#pragma once

#include <atomic>
#include <cstdint>

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
  static constexpr uint32_t kClosed = uint32_t{1} << 31U;

  // Both throw Error(kForked) where they would wait for a thread of the parent process.
  void enter();
  void close();
  void leave() noexcept;
  void open() noexcept;
  void check_process() const;

  std::atomic<uint32_t> state_{0};  // forwards under way, and kClosed
  const uint64_t fork_count_;
};

}  // namespace conclave::inline v0
