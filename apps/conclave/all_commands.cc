#include "commands.h"

#include "conclave/version.h"

#include <fmt/format.h>

namespace conclave::tool {
namespace {

std::string exit_code_text() {
  std::string text = "Exit status:\n";
  for (const ExitCodeMeaning& entry : kExitCodes) {
    text += fmt::format("  {}  {}\n", static_cast<int>(entry.code), entry.meaning);
  }
  return text;
}

}  // namespace

std::string version_text() {
  const BuildInfo& build = build_info();
  return fmt::format("conclave {}\ncommit {}, {}, {}\nfeatures: {}", build.version, build.commit,
                     build.compiler, build.build_type, build.features);
}

void add_all_commands(CommandLine& line) {
  add_run_command(line);
  add_bench_command(line);
  add_synth_command(line);
  add_convert_command(line);
  add_inspect_command(line);
  add_verify_command(line);
  add_compare_command(line);
  add_explain_command(line);
  add_plan_command(line);
  add_doctor_command(line);
  add_manifest_command(line);
  add_completion_command(line);
  add_man_page_command(line);
  add_probe_command(line);
  line.footer(
      "Examples:\n"
      "  conclave inspect ~/models/Qwen3-30B-A3B\n"
      "  conclave run ~/models/Qwen3-30B-A3B --layers 0-3 --random 64\n"
      "  conclave bench --model qwen3-30b-a3b --tokens 1,1024\n\n" +
      exit_code_text() + "\nconclave COMMAND --help describes a command.");
}

}  // namespace conclave::tool
