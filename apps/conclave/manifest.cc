// conclave manifest: writes checksums of every tensor beside the model.
#include "commands.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <memory>
#include <string>

namespace conclave::tool {

void add_manifest_command(CommandLine& line) {
  Command command = line.add_command(
      "manifest", "Write conclave.manifest.json: a checksum of every tensor of the model");
  auto model_dir = std::make_shared<std::string>();
  command
      .positional(kModelDir, *model_dir,
                  "Hugging Face model directory: config.json and safetensors")
      .required();
  command.footer(
      "run and verify compare what they read with it when given --check-manifest.\n\n"
      "Examples:\n"
      "  conclave manifest ~/models/Qwen3-30B-A3B\n"
      "  conclave verify ~/models/Qwen3-30B-A3B --check-manifest");
  command.on_run([model_dir] {
    Checkpoint::write_manifest(*model_dir);
    const std::filesystem::path file = std::filesystem::path(*model_dir) / "conclave.manifest.json";
    fmt::print("wrote {}\n", file.string());
    return ExitCode::kOk;
  });
}

}  // namespace conclave::tool
