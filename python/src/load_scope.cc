#include "load_scope.h"

#include <chrono>

namespace conclave::python {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetweenLooks{50};

thread_local bool is_loading = false;
thread_local Clock::time_point last_look;

}  // namespace

LoadScope::LoadScope() {
  is_loading = true;
  last_look = Clock::now();
}

LoadScope::~LoadScope() { is_loading = false; }

void SignalSink::progress(std::string_view, int64_t, int64_t) {
  if (!is_loading) return;
  const Clock::time_point now = Clock::now();
  if (now - last_look < kBetweenLooks) return;
  last_look = now;
  const nb::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw Interrupted{};
}

}  // namespace conclave::python
