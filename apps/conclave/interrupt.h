// Ctrl-C during work that looks for it: the work ends as by any other error, and takes away what it
// has half written. Everywhere else it ends the process at once.
#pragma once

namespace conclave::tool {

// While one is alive the first SIGINT or SIGTERM is only noted, and a second one ends the process.
// Scopes may lie in each other and in several threads. One that nobody has looked for ends the
// process with the last scope.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;
};

// Throws Error(kCancelled) if a scope has noted a signal. From any thread.
void check_interrupt();

}  // namespace conclave::tool
