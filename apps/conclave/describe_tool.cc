#include "commands.h"

#include "conclave/version.h"

#include <fmt/format.h>

#include <string>

namespace conclave::tool {
namespace {

constexpr int kHelpColumn = 34;

std::string version_text() {
  const BuildInfo& build = build_info();
  return fmt::format("conclave {}\ncommit {}, {}, {}\nfeatures: {}", build.version, build.commit,
                     build.compiler, build.build_type, build.features);
}

std::string exit_code_text() {
  std::string text = "Exit status:\n";
  for (const ExitCodeMeaning& entry : kExitCodes) {
    text += fmt::format("  {}  {}\n", static_cast<int>(entry.code), entry.meaning);
  }
  return text;
}

}  // namespace

void describe_tool(CLI::App& tool, Action& chosen) {
  tool.name("conclave");
  tool.description("Runs, checks and measures the Mixture-of-Experts layers of a model.");
  tool.set_version_flag("-V,--version", version_text(),
                        "Print version, commit, compiler and features");
  tool.require_subcommand(0, 1);
  tool.get_formatter()->column_width(kHelpColumn);
  tool.footer(
      "Examples:\n"
      "  conclave inspect ~/models/Qwen3-30B-A3B\n"
      "  conclave run ~/models/Qwen3-30B-A3B --layers 0-3 --random 64\n"
      "  conclave bench --model qwen3-30b-a3b --tokens 1,1024\n\n" +
      exit_code_text() + "\nconclave COMMAND --help describes a command.");
  add_run_command(tool, chosen);
  add_bench_command(tool, chosen);
  add_synth_command(tool, chosen);
  add_inspect_command(tool, chosen);
  add_verify_command(tool, chosen);
  add_explain_command(tool, chosen);
  add_doctor_command(tool, chosen);
  add_manifest_command(tool, chosen);
  add_completion_command(tool, chosen);
  add_man_page_command(tool, chosen);
}

}  // namespace conclave::tool
