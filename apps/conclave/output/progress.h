// Shows the progress of long steps: a bar on a terminal, nothing elsewhere.
#pragma once

#include "conclave/context.h"

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace conclave::tool {

enum class ProgressMode : uint8_t { kAuto, kOff };

// Receives the library's log and progress. Thread-safe.
class Console final : public LogSink {
 public:
  explicit Console(ProgressMode mode);
  ~Console() override;
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  // Warnings and errors go to stderr; the rest is dropped.
  void log(LogLevel level, std::string_view message) override;
  // Throws Error(kCancelled) if an InterruptScope has noted a signal.
  void progress(std::string_view phase, int64_t done, int64_t total) override;

  // Names the current subject, shown before the library's phase: "layer 3".
  void subject(std::string subject);
  // Takes the bar off the screen; call before printing.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  void draw(Clock::time_point now);
  void erase();

  const bool enabled_;
  std::mutex mutex_;
  std::string subject_;
  std::string phase_;
  int64_t done_ = 0;
  int64_t total_ = 0;
  Clock::time_point phase_begin_;
  Clock::time_point last_draw_;
  int drawn_columns_ = 0;
};

// Returns the bar: "layer 3: packing [=====>    ]  45 %  1.2 of 2.4 GB, 1.1 GB/s, 1 s left".
std::string progress_line(std::string_view label, int64_t done, int64_t total, double seconds,
                          int columns);

}  // namespace conclave::tool
