// The whole tool as a function, for main and for `python -m conclave`.
#pragma once

namespace conclave::tool {

// Parses the arguments, runs the subcommand, reports errors and flushes the output. Returns the
// exit status.
int run_tool(int argc, const char* const* argv);

}  // namespace conclave::tool
