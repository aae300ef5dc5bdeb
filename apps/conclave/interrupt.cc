#include "interrupt.h"

#include "conclave/error.h"

#include <array>
#include <atomic>
#include <csignal>
#include <mutex>
#include <string>

namespace conclave::tool {
namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM};

std::atomic<int> noted{0};
static_assert(std::atomic<int>::is_always_lock_free);  // it is written by a handler
std::atomic<bool> seen{false};

std::mutex scopes_mutex;
int scopes = 0;
std::array<struct sigaction, kSignals.size()> before;

void note(int signal) { noted = signal; }

void listen() {
  noted = 0;
  seen = false;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = &note;
    action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(kSignals[i], nullptr, &before[i]);
    // A shell has its background jobs ignore Ctrl-C.
    if (before[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
  }
}

void stop_listening() {
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before[i], nullptr);
}

}  // namespace

InterruptScope::InterruptScope() {
  const std::scoped_lock lock(scopes_mutex);
  if (scopes++ == 0) listen();
}

InterruptScope::~InterruptScope() {
  const std::scoped_lock lock(scopes_mutex);
  if (--scopes > 0) return;
  stop_listening();
  if (noted != 0 && !seen) std::raise(noted);
}

void check_interrupt() {
  if (noted == 0) return;
  seen = true;
  throw Error(ErrorCode::kCancelled,
              {.what = "ended by the user",
               .found = noted == SIGINT ? "SIGINT" : "signal " + std::to_string(noted)});
}

}  // namespace conclave::tool
