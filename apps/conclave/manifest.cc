// conclave manifest: writes checksums of every tensor beside the model.
#include "commands.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <memory>
#include <string>

namespace conclave::tool {

void add_manifest_command(CommandLine& line) {
  Command command = line.add_command(
      "manifest", "Write checksums of every tensor, with its type and shape, beside the model");
  auto model_dir = std::make_shared<std::string>();
  command
      .positional(kModelDir, *model_dir,
                  "Hugging Face model directory, which gets a conclave.manifest.json, or a GGUF "
                  "file (of a split model the first), beside which FILE.conclave.manifest.json is "
                  "written")
      .required();
  command.footer(
      "run and verify compare what they read with it when given --check-manifest.\n\n"
      "Examples:\n"
      "  conclave manifest ~/models/Qwen3-30B-A3B\n"
      "  conclave manifest Qwen3-30B-A3B-Q4_K_M.gguf\n"
      "  conclave verify ~/models/Qwen3-30B-A3B --check-manifest");
  command.on_run([model_dir] {
    fmt::print("wrote {}\n", Checkpoint::write_manifest(*model_dir).string());
    return ExitCode::kOk;
  });
}

}  // namespace conclave::tool
