// conclave synth: streams a random checkpoint in a real format and of any size to disk.
#include "commands.h"
#include "convert/conversion_options.h"
#include "input/machine_options.h"
#include "input/ranges.h"
#include "input/shape_options.h"
#include "interrupt.h"
#include "output/numbers.h"
#include "synth/coded.h"
#include "synth/layout.h"
#include "synth/write.h"

#include "conclave/convert.h"
#include "conclave/error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

namespace conclave::tool {
namespace {

struct SynthOptions {
  std::vector<std::string> targets;  // [PRESET] OUT_DIR
  ShapeOptions shape;
  std::string model_type;
  int64_t layers = 0;
  uint64_t seed = 0;
  std::string shard_size = "5GB";
  std::string container;
  bool force = false;
  MachineOptions machine;
  OutputOptions printing;
};

// Codes are made of such values.
constexpr const char* kValues = "bf16";

ModelContainer container_of(const SynthOptions& options) {
  return container_of_result({.destination = options.targets.back(),
                              .format = options.shape.dtype,
                              .container = parse_container(options.container)});
}

// Whether weights are drawn in the form itself; others are made of values.
bool is_drawn(const SynthOptions& options) {
  if (container_of(options) == ModelContainer::kGguf) return false;
  return options.shape.dtype.empty() || has_drawn_form(options.shape.dtype);
}

std::string form_name(const SynthOptions& options) {
  return options.shape.dtype.empty() ? kValues : options.shape.dtype;
}

SynthModel resolve_model(const SynthOptions& options) {
  ShapeOptions shape = options.shape;
  if (!is_drawn(options)) shape.dtype = kValues;
  if (options.targets.size() == 2) shape.models = options.targets.front();
  if (shape.models.empty() && !any_size_given(shape)) {
    throw Error(ErrorCode::kInvalidArgument,
                ErrorDetail{.what = "the model's sizes are missing",
                            .expected = "a preset before OUT_DIR, or -E, -k, -H and -I"});
  }
  const std::vector<NamedShape> shapes = resolve_shapes(shape);
  if (shapes.size() != 1) {
    throw Error(ErrorCode::kInvalidArgument,
                ErrorDetail{.what = "synth writes one model", .found = shape.models});
  }
  SynthModel model;
  model.spec = shapes.front().spec;
  model.model_type = shapes.front().model_type;
  if (!options.model_type.empty()) model.model_type = options.model_type;
  if (model.model_type.empty()) {
    model.model_type = model.spec.shared.mode == SharedMode::kNone ? "qwen3_moe" : "qwen2_moe";
  }
  model.num_layers = options.layers != 0 ? options.layers : shapes.front().num_layers;
  check_family(model);
  // A preset is one model; sizes alone are of any of the family.
  if (container_of(options) == ModelContainer::kGguf && shape.models.empty()) {
    model.spec.router.renormalize = usual_renormalize(model.model_type);
  }
  return model;
}

void require_empty(const std::filesystem::path& directory, bool force) {
  std::error_code problem;
  const bool full =
      std::filesystem::exists(directory, problem) && !std::filesystem::is_empty(directory, problem);
  if (force || !full) return;
  throw Error(ErrorCode::kFileWrite, {.what = "the directory is not empty",
                                      .file = directory.string(),
                                      .hint = "choose another, or --force to write into it"});
}

void prepare_directory(const std::filesystem::path& directory, uint64_t bytes) {
  std::error_code problem;
  std::filesystem::create_directories(directory, problem);
  if (problem) {
    throw Error(ErrorCode::kFileWrite, {.what = "cannot make the directory",
                                        .file = directory.string(),
                                        .found = problem.message()});
  }
  // An old config.json would belong to other tensors.
  std::filesystem::remove(directory / "config.json", problem);
  const std::filesystem::space_info space = std::filesystem::space(directory, problem);
  if (!problem && space.available < bytes) {
    throw Error(ErrorCode::kFileWrite, {.what = "too little room on the disk",
                                        .file = directory.string(),
                                        .expected = bytes_text(bytes),
                                        .found = bytes_text(space.available)});
  }
}

WrittenModel write_drawn(const SynthModel& model, const SynthOptions& options,
                         const Context& context, Console& console) {
  const std::filesystem::path directory = options.targets.back();
  const std::vector<SynthShard> shards =
      plan_shards(model, parse_byte_size(options.shard_size, "--shard-size"));
  WrittenModel written{.path = directory, .shards = shards.size()};
  for (const SynthShard& shard : shards) written.bytes += shard.bytes;
  prepare_directory(directory, written.bytes);
  write_checkpoint(context, model, shards, directory, options.seed, console);
  return written;
}

WrittenModel write_coded(const SynthModel& model, const SynthOptions& options,
                         const Context& context) {
  return write_coded_checkpoint(context,
                                {.model = model,
                                 .format = form_name(options),
                                 .container = container_of(options),
                                 .destination = options.targets.back(),
                                 .shard_bytes = parse_byte_size(options.shard_size, "--shard-size"),
                                 .seed = options.seed});
}

ExitCode run_synth(const SynthOptions& options) {
  const SynthModel model = resolve_model(options);
  require_empty(options.targets.back(), options.force);
  Console console(options.printing.progress());
  const Context context = make_context(options.machine, &console);
  const bool drawn = is_drawn(options);
  const InterruptScope interrupt;
  const WrittenModel written =
      drawn ? write_drawn(model, options, context, console) : write_coded(model, options, context);
  console.clear();
  fmt::print("wrote {}: {}, {} layer{} of {}{}, {} in {} shard{}\n", written.path.string(),
             model.model_type, model.num_layers, model.num_layers == 1 ? "" : "s",
             shape_text(model.spec), drawn ? "" : fmt::format(" as {}", form_name(options)),
             bytes_text(written.bytes), written.shards, written.shards == 1 ? "" : "s");
  return ExitCode::kOk;
}

}  // namespace

void add_synth_command(CommandLine& line) {
  Command command = line.add_command(
      "synth", "Write a random checkpoint of real format: config.json, index and shards");
  auto options = std::make_shared<SynthOptions>();
  command
      .positional(kOutputTarget, options->targets, 2,
                  "[PRESET] OUT_DIR: what to write (see bench --help for the presets), and "
                  "where; without a preset give -E, -k, -H and -I")
      .required();
  add_shape_options(command, options->shape, TypesOf::kWritten);
  command.choice("--model-type", options->model_type, synth_model_types(),
                 "Family whose names and config keys to use (default: the preset's)");
  command.number("-n,--layers", "N", options->layers, {1, 1 << 16},
                 "Number of layers (default: the preset's, or 1)");
  command.seed(options->seed, "Seed of the weights");
  command.text("--shard-size", "SIZE", options->shard_size, "Largest shard, such as 5GB or 512MiB")
      .with_default();
  command.choice("--container", options->container, container_names(),
                 "Kind of model, where both have the form: mxfp4 (default: directory, or gguf if "
                 "OUT_DIR ends in .gguf)");
  command.flag("--force", options->force,
               "Write into a directory that is not empty; where codes are made of values, replace "
               "the model there");
  add_threads_option(command, options->machine);
  add_progress_option(command, options->printing);
  command.footer(
      "Only the MoE layers' tensors are written. The values are a pure function of the seed.\n"
      "GGUF's types make GGUF files, and the other forms directories.\n\n"
      "Examples:\n"
      "  conclave synth qwen3-30b-a3b ./qwen3 --layers 2\n"
      "  conclave synth mixtral-8x7b /data/mixtral --shard-size 10GB\n"
      "  conclave synth qwen3-30b-a3b ./qwen3-q4 --layers 1 --dtype q4_k\n"
      "  conclave synth qwen3-30b-a3b ./qwen3-gptq --layers 1 --dtype gptq-int4:group=64,asym\n"
      "  conclave synth -E 8 -k 2 -H 64 -I 32 --model-type olmoe --layers 3 ./tiny");
  command.on_run([options] { return run_synth(*options); });
}

}  // namespace conclave::tool
