// Moves every test into the source tree's root, wherever it is started: paths of testdata are
// relative to it, and some folders are listed before main, to name the cases.
//
// The root is where the build found it. CONCLAVE_SOURCE_ROOT names another one, for a program that
// was moved to a machine without that folder; without either, the test stays where it is.
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

namespace {

// Priority 101 runs before the constructors of C++, some of which list folders.
[[gnu::constructor(101)]] void enter_source_root() {
  const char* named = std::getenv("CONCLAVE_SOURCE_ROOT");
  if (chdir(named != nullptr ? named : CONCLAVE_TEST_SOURCE_ROOT) == 0 || named == nullptr) return;
  std::perror("CONCLAVE_SOURCE_ROOT");
  _exit(2);
}

}  // namespace
