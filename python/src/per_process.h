// State with locks that a forked child must not inherit: threads that held them stay in the parent.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace conclave::python {

// How often this process and its ancestors have forked since the module was loaded.
uint64_t fork_count() noexcept;

// One T per process: a child's first use creates another one and leaves the parent's untouched,
// since that may be in any state.
template <class T>
class PerProcess {
 public:
  PerProcess() : node_(new Node{.fork = fork_count()}) {}
  ~PerProcess() {
    const std::unique_ptr<Node> last(node_.load());
    if (last->fork != fork_count())
      static_cast<void>(new std::unique_ptr<T>(std::move(last->value)));
  }
  PerProcess(const PerProcess&) = delete;
  PerProcess& operator=(const PerProcess&) = delete;

  T& get() const {
    Node* node = node_.load(std::memory_order_acquire);
    const uint64_t fork = fork_count();
    if (node->fork == fork) return *node->value;
    auto fresh = std::make_unique<Node>(Node{.fork = fork});
    if (node_.compare_exchange_strong(node, fresh.get())) return *fresh.release()->value;
    return *node->value;
  }

 private:
  struct Node {
    uint64_t fork;
    std::unique_ptr<T> value = std::make_unique<T>();
  };
  mutable std::atomic<Node*> node_;
};

}  // namespace conclave::python
