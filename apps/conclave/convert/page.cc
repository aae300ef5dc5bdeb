#include "convert/page.h"

#include "convert/charts.h"
#include "convert/report.h"
#include "output/numbers.h"
#include "output/page_parts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace conclave::tool {
namespace {

using page::key;
using page::section;
using page::table;
using page::tile;

constexpr size_t kListed = 10;

struct TokenError {
  int64_t layer = 0;
  size_t token = 0;
  double error = 0;
  double median = 0;
};

std::vector<TokenError> worst_tokens(const ConversionReport& report) {
  std::vector<TokenError> all;
  for (const ConvertedLayer& layer : report.layers) {
    for (size_t i = 0; i < layer.tokens.size(); ++i) {
      all.push_back({layer.layer, i, layer.tokens[i], layer.median});
    }
  }
  std::ranges::stable_sort(all, std::ranges::greater(), &TokenError::error);
  all.resize(std::min(all.size(), kListed));
  return all;
}

std::string token_table(const ConversionReport& report) {
  std::vector<std::vector<std::string>> rows;
  for (const TokenError& token : worst_tokens(report)) {
    rows.push_back({fmt::format("layer {}, token {}", token.layer, token.token),
                    percent(token.error, 3), percent(token.median, 3)});
  }
  return table({"token", "error", "layer's median"}, rows);
}

std::string matrix_table(const ConversionReport& report) {
  std::vector<const ConvertedMatrix*> all;
  for (const ConvertedMatrix& module : report.matrices) all.push_back(&module);
  std::ranges::stable_sort(all, std::ranges::greater(),
                           [](const ConvertedMatrix* module) { return module->error.relative(); });
  all.resize(std::min(all.size(), kListed));
  std::vector<std::vector<std::string>> rows;
  for (const ConvertedMatrix* module : all) {
    rows.push_back({module->name, percent(module->error.relative(), 3),
                    fmt::format("{:.2f}", module->error.worst_steps)});
  }
  return table({"linear layer", "error", "steps"}, rows);
}

double relative_error(const ConversionReport& report) {
  QuantiseError sum;
  for (const ConvertedMatrix& module : report.matrices) sum.add(module.error);
  return sum.relative();
}

std::string tiles(const ConversionReport& report) {
  const auto before = static_cast<double>(report.bytes_before);
  const auto after = static_cast<double>(report.bytes_after);
  std::string out =
      tile(fmt::format("{} → {}", bytes_text(report.bytes_before), bytes_text(report.bytes_after)),
           fmt::format("{:.0f} % of the model's size", before > 0 ? 100 * after / before : 100.0));
  out += tile(percent(relative_error(report)), "relative error of all converted weights");
  if (report.layers.empty()) return out;
  const auto worst = std::ranges::max_element(report.layers, {}, &ConvertedLayer::median);
  out += tile(percent(worst->median),
              fmt::format("median output error of the worst layer, {}", worst->layer));
  const std::vector<TokenError> tokens = worst_tokens(report);
  if (tokens.empty()) return out;
  return out + tile(percent(tokens.front().error),
                    fmt::format("worst token: {} of layer {}", tokens.front().token,
                                tokens.front().layer));
}

std::string output_section(const ConversionReport& report) {
  if (report.layers.empty()) return {};
  const std::string legend = page::legend(
      key("soft", "a token") + key("main", "median of the layer") + key("warm", "worst token"));
  return section("Outputs of layers",
                 fmt::format("{} {} rows went through each layer of both models in float64. "
                             "The error of a token is the length of the difference over the "
                             "length of the original's output.",
                             report.tokens, report.input.empty() ? "random" : "recorded"),
                 legend + output_chart(report));
}

std::string worst_sections(const ConversionReport& report) {
  std::string out = "<div class=\"columns\">";
  if (!report.layers.empty()) {
    out +=
        section("Worst tokens", "Largest errors of outputs, over all layers.", token_table(report));
  }
  out += section("Worst matrices",
                 "Largest relative errors. Steps are distances between neighbouring codes; half "
                 "of one is rounding, more is what lies beyond the largest code.",
                 matrix_table(report));
  return out + "</div>\n";
}

// Results in another container may have less than the model.
std::string completeness(const ConversionReport& report) {
  std::string out;
  if (!report.incomplete.empty()) {
    out += fmt::format("<p><b>MoE layers alone:</b> {}.</p>\n", escaped(report.incomplete));
  }
  if (!report.no_tokenizer.empty()) {
    out += fmt::format("<p>No tokenizer: {}.</p>\n", escaped(report.no_tokenizer));
  }
  if (report.tensors_left_out.empty()) return out;
  return out + fmt::format("<p>{} tensor{} of the source {} not in the result, such as {}.</p>\n",
                           report.tensors_left_out.size(),
                           report.tensors_left_out.size() == 1 ? "" : "s",
                           report.tensors_left_out.size() == 1 ? "is" : "are",
                           escaped(report.tensors_left_out.front()));
}

}  // namespace

std::string conversion_page(const ConversionReport& report) {
  const std::string name = std::filesystem::path(report.destination).filename().string();
  const std::string legend =
      page::legend(key("main", "converted matrices") + key("rest", "all else"));
  std::string content =
      fmt::format("<h1>{}</h1>\n<p>{} experts as {}, scales by {}; {} matrices.</p>\n",
                  escaped(name), escaped(report.model_type), escaped(forms_text(report)),
                  report.scales, report.matrices.size());
  content += completeness(report);
  content += "<div class=\"tiles\">\n" + tiles(report) + "</div>\n";
  content += section("Size", "Bytes of all tensors.", legend + size_chart(report));
  content += output_section(report);
  content += section("Matrices",
                     "Median relative error over the experts, by kind of matrix and layer: the "
                     "stronger the colour, the larger. A field says its numbers when pointed at.",
                     matrix_chart(report));
  content += worst_sections(report);
  content += fmt::format(
      "<footer>{} → {}; {} shard{}; {}. Everything on this page is also in "
      "conversion.json.</footer>\n",
      escaped(report.source), escaped(report.destination), report.shards,
      report.shards == 1 ? "" : "s",
      report.input.empty() ? fmt::format("seed {}", report.seed)
                           : "rows of " + escaped(report.input));
  return page::document(fmt::format("{}: conversion to {}", name, forms_text(report)), content);
}

}  // namespace conclave::tool
