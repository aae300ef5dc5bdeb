// conclave manifest: checksums of every tensor, written beside the model.
#include "commands.h"

#include "conclave/checkpoint.h"

#include <fmt/format.h>

#include <memory>
#include <string>

namespace conclave::tool {

void add_manifest_command(CLI::App& tool, Action& chosen) {
  CLI::App* command = tool.add_subcommand(
      "manifest", "Write conclave.manifest.json: a checksum of every tensor of the model");
  auto model_dir = std::make_shared<std::string>();
  command
      ->add_option("MODEL_DIR", *model_dir,
                   "Hugging Face model directory: config.json and safetensors")
      ->required()
      ->type_name("");
  command->footer(
      "run and verify compare what they read with it when given --check-manifest.\n\n"
      "Examples:\n"
      "  conclave manifest ~/models/Qwen3-30B-A3B\n"
      "  conclave verify ~/models/Qwen3-30B-A3B --check-manifest");
  command->callback([model_dir, &chosen] {
    chosen = [model_dir] {
      Checkpoint::write_manifest(*model_dir);
      fmt::print("wrote {}\n",
                 (std::filesystem::path(*model_dir) / "conclave.manifest.json").string());
      return ExitCode::kOk;
    };
  });
}

}  // namespace conclave::tool
