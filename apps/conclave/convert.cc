// conclave convert: writes a model's experts in another form, with a report of what it costs.
#include "conclave/convert.h"

#include "commands.h"
#include "convert/conversion_options.h"
#include "convert/report.h"
#include "input/batch.h"
#include "input/layer_selection.h"
#include "input/machine_options.h"
#include "input/ranges.h"
#include "interrupt.h"
#include "output/durable_file.h"
#include "output/table.h"

#include "conclave/checkpoint.h"
#include "conclave/error.h"

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace conclave::tool {
namespace {

struct ConvertOptions {
  std::string source;
  std::string destination;
  std::string form;
  std::string container;
  std::string layers;
  std::vector<std::string> keep;
  std::string scales = "amax";
  std::string shard_size = "5GB";
  std::string report;
  int64_t tokens = 32;
  uint64_t seed = 0;
  std::string input;
  std::string record;
  bool force = false;
  MachineOptions machine;
  OutputOptions printing;
};

// Recorded rows, routed by each layer's gate.
class RecordedRows final : public RowSource {
 public:
  RecordedRows(const std::string& input, const std::string& record)
      : batches_({.input = input, .record = record}), name_(input) {}

  std::string name() const override { return name_; }
  void check(int64_t layer, const MoeSpec& spec) const override {
    static_cast<void>(batches_.check(layer, spec));
  }
  ComparedRows load(int64_t layer, const MoeSpec& spec) const override {
    Batch batch = batches_.load(layer, spec);
    return {.hidden = std::move(batch.hidden),
            .router_input = std::move(batch.router_input),
            .residual_input = std::move(batch.residual_input),
            .token_ids = std::move(batch.token_ids)};
  }

 private:
  BatchSource batches_;
  std::string name_;
};

ConversionRequest request_of(const ConvertOptions& options) {
  ConversionRequest request{.source = options.source,
                            .destination = options.destination,
                            .format = options.form,
                            .container = parse_container(options.container),
                            .tokens = options.tokens,
                            .seed = options.seed,
                            .complete = write_page};
  for (const std::string& text : options.keep) request.keep.push_back(parse_keep_rule(text));
  if (options.scales == "search") request.scales = ScaleRule::kSearch;
  request.shard_bytes = parse_byte_size(options.shard_size, "--shard-size");
  if (options.force) request.existing = ExistingModel::kReplace;
  const Checkpoint checkpoint = Checkpoint::open(options.source);
  for (const CheckpointLayer* layer : select_layers(checkpoint, options.layers)) {
    request.layers.push_back(layer->index);
  }
  return request;
}

ConversionReport convert(const Context& context, const ConvertOptions& options) {
  ConversionRequest request = request_of(options);
  std::optional<RecordedRows> rows;
  if (!options.input.empty()) request.rows = &rows.emplace(options.input, options.record);
  try {
    const InterruptScope interrupt;
    return convert_model(context, request);
  } catch (const Error& error) {
    throw in_words_of_options(error, "--format");
  }
}

ExitCode run_convert(const ConvertOptions& options) {
  Console console(options.printing.progress());
  const Context context = make_context(options.machine, &console);
  const ConversionReport report = convert(context, options);
  console.clear();
  if (!options.report.empty()) write_durably(options.report, to_json(report));
  print_report(report, stdout);
  return ExitCode::kOk;
}

}  // namespace

void add_convert_command(CommandLine& line) {
  Command command = line.add_command(
      "convert", "Write a model with its experts quantised, and a report of the errors");
  auto options = std::make_shared<ConvertOptions>();
  add_model_argument(command, options->source);
  command
      .positional(kOutputDir, options->destination,
                  "Directory to make; with .gguf at its end it holds a GGUF file")
      .required();
  command
      .choice_with_options("--format", options->form, conversion_format_names(),
                           "Form of the experts; GGUF's types make GGUF files, and the others "
                           "directories; the gptq forms take "
                           "options, as gptq-int4:group=64,asym; bf16, f16 and f32 are for GGUF "
                           "files")
      .required();
  command.choice("--container", options->container, container_names(),
                 "Kind of result, where both have the form: mxfp4 (default: that of the source)");
  command.text("-l,--layers", "LIST", options->layers, "Layers such as 0-3,7 (default: all)");
  command.texts("--keep", "PATTERN=FORMAT", options->keep,
                "Linear layers to leave out, such as '*.shared_expert.*=source'; FORMAT is source, "
                "bf16, f16 or f32, or in GGUF files any of its forms; may be repeated");
  command.choice("--scales", options->scales, {"amax", "search"},
                 "amax: largest magnitude over largest code; search: least squared error");
  command.text("--shard-size", "SIZE", options->shard_size, "Largest shard, such as 5GB or 512MiB")
      .with_default();
  command
      .number("--tokens", "N", options->tokens, {0, 1 << 20},
              "Random rows for the error of each layer's output; 0: none")
      .with_default();
  command.seed(options->seed, "Seed of the random rows");
  Option input = command.text("--input", kFileValue, options->input,
                              "Recorded rows in place of random ones: a safetensors file as run "
                              "takes it, hidden_states for all layers or layers.N.hidden_states");
  command.text("--record", "NAME", options->record, "Record of the input file to use").needs(input);
  command.text("--report", kFileValue, options->report, "Also write conversion.json here");
  command.flag("--force", options->force,
               "Replace a model of this name, and begin an unfinished conversion anew");
  add_threads_option(command, options->machine);
  add_progress_option(command, options->printing);
  command.footer(
      "Routed and shared experts get codes; all other tensors and files are copied. A conversion\n"
      "that was ended goes on when it is called again.\n\n"
      "Examples:\n"
      "  conclave convert ~/models/OLMoE-1B-7B-0924 ./olmoe-int4 --format int4-group128\n"
      "  conclave convert ~/models/Qwen3-30B-A3B /data/qwen3-fp8 --format fp8-block\n"
      "  conclave convert ~/models/Qwen1.5-MoE-A2.7B ./int4 --format int4-group32 \\\n"
      "    --scales search --keep '*.shared_expert.*=source'\n"
      "  conclave convert ~/models/Qwen3-30B-A3B ./qwen3.gguf --format q4_k --scales search\n"
      "  conclave convert Qwen3-30B-A3B-Q4_K_M.gguf ./qwen3-fp8 --format fp8-block");
  command.on_run([options] { return run_convert(*options); });
}

}  // namespace conclave::tool
