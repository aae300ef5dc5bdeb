// Ctrl-C during long work: the waiting thread checks for Python signals now and then.
#pragma once

#include "binding.h"

#include "conclave/context.h"

#include <string_view>

namespace conclave::python {

// Thrown through the library; run_interruptible turns it into the Python exception behind it.
struct Interrupted {};

// The log sink of every context made here. Any thread may report progress; the one inside
// run_interruptible checks for signals. Warnings are those of Python, which may make them errors.
class SignalSink final : public LogSink {
 public:
  void log(LogLevel level, std::string_view message) override;
  void progress(std::string_view phase, int64_t done, int64_t total) override;
};

// Marks this thread as one whose progress may be interrupted. The GIL must be released.
class LoadScope {
 public:
  LoadScope();
  ~LoadScope();
  LoadScope(const LoadScope&) = delete;
  LoadScope& operator=(const LoadScope&) = delete;
};

// Runs `work` without the GIL. Throws what it throws, including KeyboardInterrupt.
template <class Work>
auto run_interruptible(const Work& work) {
  try {
    const nb::gil_scoped_release released;
    const LoadScope scope;
    return work();
  } catch (const Interrupted&) {
    // The signal handler's exception is set in this thread.
    throw nb::python_error();
  }
}

}  // namespace conclave::python
