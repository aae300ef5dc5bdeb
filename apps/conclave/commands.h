// The subcommands: each file declares its own and what runs when it is chosen.
#pragma once

#include "command_line.h"

#include <string>

namespace conclave::tool {

void add_run_command(CommandLine& line);
void add_bench_command(CommandLine& line);
void add_synth_command(CommandLine& line);
void add_convert_command(CommandLine& line);
void add_inspect_command(CommandLine& line);
void add_compare_command(CommandLine& line);
void add_verify_command(CommandLine& line);
void add_explain_command(CommandLine& line);
void add_plan_command(CommandLine& line);
void add_doctor_command(CommandLine& line);
void add_manifest_command(CommandLine& line);
void add_completion_command(CommandLine& line);
void add_man_page_command(CommandLine& line);  // hidden; the build uses it
void add_probe_command(CommandLine& line);     // hidden; doctor uses it

void add_all_commands(CommandLine& line);
// Returns "conclave 0.2.0", commit, compiler and features.
std::string version_text();

}  // namespace conclave::tool
