#include "convert/parallel.h"

#include <atomic>
#include <exception>
#include <mutex>

namespace conclave::inline v0::conversion {
namespace {

struct Loop {
  size_t count;
  const std::function<void(size_t)>& body;
  std::atomic<size_t> next{0};
  std::mutex mutex = {};
  std::exception_ptr failure = {};
};

void work(void* state, int32_t) noexcept {
  auto& loop = *static_cast<Loop*>(state);
  for (size_t i = loop.next++; i < loop.count; i = loop.next++) {
    try {
      loop.body(i);
    } catch (...) {
      const std::scoped_lock lock(loop.mutex);
      if (!loop.failure) loop.failure = std::current_exception();
      loop.next = loop.count;
    }
  }
}

}  // namespace

void for_each_index(const Context& context, size_t count, const std::function<void(size_t)>& body) {
  Loop loop{.count = count, .body = body};
  context.executor().run({.invoke = work, .state = &loop});
  if (loop.failure) std::rethrow_exception(loop.failure);
}

}  // namespace conclave::inline v0::conversion
