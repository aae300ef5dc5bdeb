#include "load_scope.h"

#include <chrono>
#include <string>

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

void SignalSink::log(LogLevel level, std::string_view message) {
  if (level < LogLevel::kWarning) return;
  const std::string text(message);
  const nb::gil_scoped_acquire held;
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) == 0) return;
  if (is_loading) throw Interrupted{};
  PyErr_WriteUnraisable(nullptr);
}

void SignalSink::progress(std::string_view, int64_t, int64_t) {
  if (!is_loading) return;
  const Clock::time_point now = Clock::now();
  if (now - last_look < kBetweenLooks) return;
  last_look = now;
  const nb::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw Interrupted{};
}

}  // namespace conclave::python
