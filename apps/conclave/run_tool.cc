#include "run_tool.h"

#include "commands.h"
#include "exit_code.h"
#include "output/report_error.h"

#include "conclave/error.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

namespace conclave::tool {
namespace {

ExitCode run_guarded(const Action& action) {
  try {
    return action();
  } catch (const Error& error) {
    report_error(error);
    return exit_code(error.code());
  } catch (const std::bad_alloc&) {
    report_error(Error(ErrorCode::kOutOfMemory, "out of memory"));
    return ExitCode::kResources;
  } catch (const std::exception& error) {
    report_error(Error(ErrorCode::kInternal, error.what()));
    return ExitCode::kInternal;
  }
}

// A full disk or a closed pipe shows only when the last buffer is written.
ExitCode flush_output(ExitCode code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  report_error(Error(ErrorCode::kFileWrite, {.what = "cannot write the output",
                                             .file = "standard output",
                                             .found = std::strerror(errno)}));
  return ExitCode::kResources;
}

ExitCode run_line(int argc, const char* const* argv) {
  CommandLine line("conclave",
                   "Runs, checks and measures the Mixture-of-Experts layers of a model.",
                   version_text());
  add_all_commands(line);
  return run_guarded(line.parse(argc, argv));
}

}  // namespace

int run_tool(int argc, const char* const* argv) {
  return static_cast<int>(flush_output(run_line(argc, argv)));
}

}  // namespace conclave::tool
