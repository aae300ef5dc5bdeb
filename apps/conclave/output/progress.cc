#include "output/progress.h"

#include "interrupt.h"
#include "output/numbers.h"
#include "output/report_error.h"
#include "output/terminal.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace conclave::tool {
namespace {

// Short steps show no bar at all: a flash would only distract.
constexpr auto kFirstDraw = std::chrono::milliseconds(300);
constexpr auto kRedraw = std::chrono::milliseconds(100);

}  // namespace

std::string progress_line(std::string_view label, int64_t done, int64_t total, double seconds,
                          int columns) {
  const double share = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
  std::string tail =
      fmt::format("{:3.0f} %  {} of {}", 100.0 * share, bytes_text(static_cast<uint64_t>(done)),
                  bytes_text(static_cast<uint64_t>(total)));
  if (seconds > 0.0 && done > 0) {
    const double rate = static_cast<double>(done) / seconds;
    tail += fmt::format(", {}/s, {:.0f} s left", bytes_text(static_cast<uint64_t>(rate)),
                        std::ceil(static_cast<double>(total - done) / rate));
  }
  constexpr int kLargestBar = 30;
  constexpr int kSmallestBar = 5;
  const int spare = columns - display_width(label) - display_width(tail) - 6;
  if (spare < kSmallestBar) {
    std::string line = fmt::format("{} {}", label, tail);
    if (display_width(line) >= columns) line = tail;
    return line.substr(0, static_cast<size_t>(std::max(0, columns - 1)));
  }
  const int cells = std::min(spare, kLargestBar);
  const int full = static_cast<int>(std::lround(share * cells));
  return fmt::format("{} [{}{}] {}", label, std::string(static_cast<size_t>(full), '='),
                     std::string(static_cast<size_t>(cells - full), ' '), tail);
}

Console::Console(ProgressMode mode)
    : enabled_(mode == ProgressMode::kAuto && is_terminal(stderr) &&
               environment_value("TERM") != "dumb") {}

Console::~Console() { erase(); }

void Console::log(LogLevel level, std::string_view message) {
  if (level < LogLevel::kWarning) return;
  const std::scoped_lock lock(mutex_);
  erase();
  report_warning(message);
}

void Console::progress(std::string_view phase, int64_t done, int64_t total) {
  check_interrupt();
  if (!enabled_ || total <= 0) return;
  const std::scoped_lock lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (phase != phase_ || total != total_ || done_ >= total_) {
    phase_ = phase;
    total_ = total;
    done_ = 0;
    phase_begin_ = now;
    last_draw_ = now + kFirstDraw - kRedraw;
  }
  done_ = std::max(done_, done);
  if (done_ >= total_) {
    erase();
  } else if (now - last_draw_ >= kRedraw) {
    draw(now);
  }
}

void Console::subject(std::string subject) {
  const std::scoped_lock lock(mutex_);
  subject_ = std::move(subject);
  phase_.clear();
}

void Console::clear() {
  const std::scoped_lock lock(mutex_);
  erase();
}

void Console::draw(Clock::time_point now) {
  last_draw_ = now;
  const std::string label = subject_.empty() ? phase_ : fmt::format("{}: {}", subject_, phase_);
  const double seconds = std::chrono::duration<double>(now - phase_begin_).count();
  const std::string line = progress_line(label, done_, total_, seconds, terminal_columns(stderr));
  const int width = display_width(line);
  fmt::print(stderr, "\r{}{}", line,
             std::string(static_cast<size_t>(std::max(0, drawn_columns_ - width)), ' '));
  std::fflush(stderr);
  drawn_columns_ = width;
}

// Writes blanks instead of an erase code, which works on any terminal.
void Console::erase() {
  if (drawn_columns_ == 0) return;
  fmt::print(stderr, "\r{}\r", std::string(static_cast<size_t>(drawn_columns_), ' '));
  std::fflush(stderr);
  drawn_columns_ = 0;
}

}  // namespace conclave::tool
