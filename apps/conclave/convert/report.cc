#include "convert/report.h"

#include "convert/median.h"
#include "convert/page.h"
#include "output/durable_file.h"
#include "output/numbers.h"
#include "output/table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

namespace conclave::tool {
namespace {

// A row of the table: what is known of a layer.
struct LayerLine {
  int64_t layer = 0;
  int64_t modules = 0;
  uint64_t before = 0;
  uint64_t after = 0;
  QuantiseError error;
  double worst_matrix = 0;
};

std::vector<LayerLine> lines_of(const ConversionReport& report) {
  std::map<int64_t, LayerLine> lines;
  for (const ConvertedMatrix& module : report.matrices) {
    LayerLine& line = lines[module.layer];
    line.layer = module.layer;
    ++line.modules;
    line.before += module.bytes_before;
    line.after += module.bytes_after;
    line.error.add(module.error);
    line.worst_matrix = std::max(line.worst_matrix, module.error.relative());
  }
  std::vector<LayerLine> sorted;
  for (const auto& [layer, line] : lines) sorted.push_back(line);
  return sorted;
}

std::vector<Column> columns() {
  return {{"layer", "layer", 5},
          {"matrices", "matrices", 8},
          {"bytes_before", "before", 9},
          {"bytes_after", "after", 9},
          {"relative_error", "error", 8},
          {"worst_matrix", "worst matrix", 12},
          {"worst_steps", "steps", 6},
          {"output_median", "output median", 13},
          {"output_worst", "output worst", 12},
          {"worst_token", "token", 5}};
}

Cell bytes_cell(uint64_t bytes) { return {bytes, bytes_text(bytes)}; }

std::vector<Cell> cells_of(const LayerLine& line, const ConvertedLayer* output) {
  std::vector<Cell> cells = {integer_cell(line.layer),
                             integer_cell(line.modules),
                             bytes_cell(line.before),
                             bytes_cell(line.after),
                             error_cell(line.error.relative()),
                             error_cell(line.worst_matrix),
                             fixed_cell(line.error.worst_steps, 2)};
  if (output == nullptr) {
    cells.insert(cells.end(), 3, absent_cell());
  } else {
    cells.push_back(error_cell(output->median));
    cells.push_back(error_cell(output->worst));
    cells.push_back(integer_cell(output->worst_token));
  }
  return cells;
}

constexpr size_t kNamed = 8;

// Few names tell what they are; conversion.json has all.
std::string some_of(const std::vector<std::string>& names) {
  const auto first = std::span(names).first(std::min(names.size(), kNamed));
  if (names.size() <= kNamed) return fmt::format("{}", fmt::join(first, ", "));
  return fmt::format("{} and {} more", fmt::join(first, ", "), names.size() - kNamed);
}

void print_completeness(const ConversionReport& report, TableWriter& table) {
  if (!report.incomplete.empty() && report.keeps_others) {
    table.note(fmt::format(
        "\nthe directory has the MoE layers; other tensors are kept as gguf.NAME, which no engine "
        "reads, and there is no tokenizer: {}",
        report.incomplete));
  } else if (!report.incomplete.empty()) {
    table.note(
        fmt::format("\nthe file has MoE layers alone, no attention, embedding, norm or "
                    "tokenizer of the model: {}",
                    report.incomplete));
  }
  if (!report.no_tokenizer.empty()) {
    table.note("\nno tokenizer in the result: " + report.no_tokenizer);
  }
  if (report.tensors_left_out.empty()) return;
  table.note(
      fmt::format("\ntensors that are not in the result: {}", some_of(report.tensors_left_out)));
}

}  // namespace

std::vector<KindSummary> summarise(const ConversionReport& report) {
  std::map<std::pair<std::string, int64_t>, std::vector<const ConvertedMatrix*>> groups;
  for (const ConvertedMatrix& module : report.matrices) {
    groups[{module.kind, module.layer}].push_back(&module);
  }
  std::vector<KindSummary> summaries;
  for (const auto& [key, modules] : groups) {
    KindSummary summary{
        .kind = key.first, .layer = key.second, .count = static_cast<int64_t>(modules.size())};
    std::vector<double> errors;
    for (const ConvertedMatrix* module : modules) {
      errors.push_back(module->error.relative());
      summary.worst_steps = std::max(summary.worst_steps, module->error.worst_steps);
    }
    summary.worst = std::ranges::max(errors);
    summary.median = median(std::move(errors));
    summaries.push_back(std::move(summary));
  }
  return summaries;
}

std::string forms_text(const ConversionReport& report) {
  std::set<std::string> others;
  for (const ConvertedMatrix& module : report.matrices) others.insert(module.format);
  others.erase(report.format);
  if (others.empty()) return report.format;
  return fmt::format("{}, some {}", report.format, fmt::join(others, ", "));
}

void write_page(const ConversionReport& report, const std::filesystem::path& directory) {
  write_durably(directory / "conversion.html", conversion_page(report));
}

void print_report(const ConversionReport& report, std::FILE* out) {
  TableWriter table(out, OutputFormat::kTable, columns());
  table.header(nlohmann::ordered_json::object(),
               {fmt::format("{} to {}, scales by {}: {} to {}", report.source, forms_text(report),
                            report.scales, bytes_text(report.bytes_before),
                            bytes_text(report.bytes_after))});
  for (const LayerLine& line : lines_of(report)) {
    const auto output = std::ranges::find(report.layers, line.layer, &ConvertedLayer::layer);
    table.row(cells_of(line, output == report.layers.end() ? nullptr : &*output));
  }
  std::string files;
  for (const std::string& name : report.left_out) files += (files.empty() ? "" : ", ") + name;
  if (!files.empty()) table.note("\nnot copied: " + files);
  print_completeness(report, table);
  if (report.shards_kept > 0) {
    table.note(fmt::format("\n{} of {} shards were there from an earlier run", report.shards_kept,
                           report.shards));
  }
  table.note(fmt::format("\nwrote {} in {} shard{}; conversion.html has the errors in pictures",
                         report.destination, report.shards, report.shards == 1 ? "" : "s"));
  table.finish("layers");
}

}  // namespace conclave::tool
