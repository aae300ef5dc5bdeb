// conclave compare: says where two records of routing differ, and how far.
#include "commands.h"
#include "input/machine_options.h"
#include "output/numbers.h"
#include "output/table.h"
#include "output/terminal.h"

#include "conclave/error.h"
#include "conclave/routing_record.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace conclave::tool {
namespace {

struct CompareOptions {
  std::vector<std::string> files;
  std::optional<double> tolerance;
  int64_t examples = 8;
  OutputOptions printing;
};

std::vector<Column> columns() {
  return {{"layer", "layer", 5},
          {"compared", "tokens", 6},
          {"other_experts", "other experts"},
          {"reordered", "reordered"},
          {"other_weights", "other weights"},
          {"worst_weight_difference", "worst weight"},
          {"worst_token", "at token", 0, Align::kLeft},
          {"only_in_first", "only in first"},
          {"only_in_second", "only in second"},
          {"ok", "check", 0, Align::kLeft}};
}

std::string token_text(const TokenKey& token) {
  return fmt::format("{}:{}", token.sequence, token.position);
}

// Without a tolerance every bit counts; with one slots may hold the same experts in another order.
bool is_ok(const LayerDifferences& layer, const std::optional<double>& tolerance) {
  if (!tolerance) return layer.equal();
  return layer.only_in_first + layer.only_in_second + layer.other_experts == 0 &&
         layer.worst_weight_difference <= *tolerance;
}

std::vector<Cell> cells(const LayerDifferences& layer, bool ok) {
  const bool differs = layer.other_experts + layer.reordered + layer.other_weights != 0;
  return {integer_cell(layer.layer),
          integer_cell(layer.compared),
          integer_cell(layer.other_experts),
          integer_cell(layer.reordered),
          integer_cell(layer.other_weights),
          error_cell(layer.worst_weight_difference),
          differs ? text_cell(token_text(layer.worst_token)) : absent_cell(),
          integer_cell(layer.only_in_first),
          integer_cell(layer.only_in_second),
          {ok, ok ? "ok" : "differs", ok ? Style::kGood : Style::kBad}};
}

void note_rest(const RoutingComparison& found, TableWriter& table) {
  if (!found.only_in_first.empty()) {
    table.note(
        fmt::format("layers in the first record only: {}", fmt::join(found.only_in_first, ", ")));
  }
  if (!found.only_in_second.empty()) {
    table.note(
        fmt::format("layers in the second record only: {}", fmt::join(found.only_in_second, ", ")));
  }
  for (const LayerDifferences& layer : found.layers) {
    if (!layer.same_spec) {
      table.note(fmt::format("layer {}: the records are of layers with other specs", layer.layer));
    }
  }
  for (const RoutingDifference& example : found.examples) {
    table.note(fmt::format("layer {}, token {}: experts {} and {}, weights {} apart", example.layer,
                           token_text(example.token), fmt::join(example.first_ids, " "),
                           fmt::join(example.second_ids, " "),
                           error_text(example.weight_difference)));
  }
}

ExitCode run_compare(const CompareOptions& options) {
  if (options.tolerance && !(std::isfinite(*options.tolerance) && *options.tolerance >= 0)) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "the tolerance is no number from 0",
                                              .tensor = "--tolerance",
                                              .found = fmt::format("{}", *options.tolerance)});
  }
  if (options.files.size() != 2) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "two records are compared",
                                              .tensor = "FILE",
                                              .expected = "2 files",
                                              .found = std::to_string(options.files.size())});
  }
  const RoutingRecord first = RoutingRecord::open(options.files[0]);
  const RoutingRecord second = RoutingRecord::open(options.files[1]);
  const RoutingComparison found = compare_routing(first, second, options.examples);
  TableWriter table(stdout, parse_output_format(options.printing.format), columns());
  table.header({{"first", options.files[0]},
                {"second", options.files[1]},
                {"layers_only_in_first", found.only_in_first},
                {"layers_only_in_second", found.only_in_second}},
               {fmt::format("first:  {} {}", options.files[0], first.model),
                fmt::format("second: {} {}", options.files[1], second.model)});
  bool ok = found.only_in_first.empty() && found.only_in_second.empty();
  for (const LayerDifferences& layer : found.layers) {
    const bool layer_ok = is_ok(layer, options.tolerance);
    table.row(cells(layer, layer_ok));
    ok = ok && layer_ok;
  }
  table.note("");
  note_rest(found, table);
  table.note(ok ? "ok: the records agree" : "the records differ");
  table.finish("layers");
  return ok ? ExitCode::kOk : ExitCode::kOutsideTolerance;
}

}  // namespace

void add_compare_command(CommandLine& line) {
  Command command = line.add_command(
      "compare",
      "Compare two records of routing: which tokens differ in which layers, and how far");
  auto options = std::make_shared<CompareOptions>();
  command.positional(kFileValue, options->files, 2, "Two files of conclave run --record-routing")
      .required();
  command.real("--tolerance", "X", options->tolerance,
               "Largest difference of an expert's weight (default: all bits are equal)");
  command
      .number("--examples", "N", options->examples, {0, 100000},
              "Tokens that differ, to be listed below the table")
      .with_default();
  add_format_option(command, options->printing);
  command.footer(
      "Examples:\n"
      "  conclave run MODEL_DIR --input states.safetensors --record-routing served.safetensors\n"
      "  conclave compare served.safetensors trained.safetensors --tolerance 1e-6");
  command.on_run([options] { return run_compare(*options); });
}

}  // namespace conclave::tool
