#include "commands.h"
#include "output/report_error.h"

#include "conclave/error.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

namespace conclave::tool {
namespace {

ExitCode parse_failure(const CLI::App& tool, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) return static_cast<ExitCode>(tool.exit(error));  // --help
  const auto chosen = tool.get_subcommands();
  const std::string command = chosen.empty() ? "" : " " + chosen.front()->get_name();
  report_usage_error(error.what(), fmt::format("see conclave{} --help", command));
  return ExitCode::kUsage;
}

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

ExitCode run_tool(int argc, char** argv) {
  CLI::App tool;
  Action chosen;
  describe_tool(tool, chosen);
  try {
    tool.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return parse_failure(tool, error);
  }
  if (!chosen) {
    fmt::print("{}", tool.help());
    return ExitCode::kUsage;
  }
  return run_guarded(chosen);
}

}  // namespace
}  // namespace conclave::tool

int main(int argc, char** argv) {
  return static_cast<int>(conclave::tool::flush_output(conclave::tool::run_tool(argc, argv)));
}
