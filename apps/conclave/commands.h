// The subcommands. Each file adds its own to the tool and says what runs when it is chosen.
#pragma once

#include "exit_code.h"

#include <CLI/CLI.hpp>

#include <functional>

namespace conclave::tool {

// Set by the parser to what the command line asks for.
using Action = std::function<ExitCode()>;

void add_run_command(CLI::App& tool, Action& chosen);
void add_bench_command(CLI::App& tool, Action& chosen);
void add_synth_command(CLI::App& tool, Action& chosen);
void add_inspect_command(CLI::App& tool, Action& chosen);
void add_verify_command(CLI::App& tool, Action& chosen);
void add_explain_command(CLI::App& tool, Action& chosen);
void add_doctor_command(CLI::App& tool, Action& chosen);
void add_manifest_command(CLI::App& tool, Action& chosen);
void add_completion_command(CLI::App& tool, Action& chosen);
void add_man_page_command(CLI::App& tool, Action& chosen);  // hidden: for the build

// The whole command line: the source of the parser, the completions and the man page.
void describe_tool(CLI::App& tool, Action& chosen);

}  // namespace conclave::tool
