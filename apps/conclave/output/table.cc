#include "output/table.h"

#include "output/numbers.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace conclave::tool {
namespace {

std::string padded(std::string_view text, int width, Align align, Style style, bool color) {
  const std::string fill(static_cast<size_t>(std::max(0, width - display_width(text))), ' ');
  const std::string painted = paint(text, style, color);
  return align == Align::kLeft ? painted + fill : fill + painted;
}

std::string csv_field(const nlohmann::ordered_json& value) {
  if (value.is_null()) return {};
  if (!value.is_string()) return json_text(value, -1);
  const std::string text = value.get<std::string>();
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

std::string without_trailing_blanks(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

const std::vector<std::string>& output_format_names() {
  static const std::vector<std::string> names = {"table", "markdown", "md", "csv", "json", "jsonl"};
  return names;
}

OutputFormat parse_output_format(std::string_view name) {
  if (name == "table") return OutputFormat::kTable;
  if (name == "markdown" || name == "md") return OutputFormat::kMarkdown;
  if (name == "csv") return OutputFormat::kCsv;
  if (name == "json") return OutputFormat::kJson;
  if (name == "jsonl") return OutputFormat::kJsonl;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "unknown output format",
               .tensor = "--format",
               .expected = fmt::format("one of {}", fmt::join(output_format_names(), ", ")),
               .found = std::string(name)});
}

bool is_text(OutputFormat format) {
  return format == OutputFormat::kTable || format == OutputFormat::kMarkdown;
}

Cell absent_cell() { return {nullptr, "-"}; }
Cell text_cell(std::string text, Style style) { return {text, text, style}; }
Cell integer_cell(int64_t value) { return {value, fmt::format("{}", value)}; }
Cell fixed_cell(double value, int decimals) {
  return {value, fmt::format("{:.{}f}", value, decimals)};
}
Cell error_cell(double value) { return {value, error_text(value)}; }
Cell ms_cell(double ms) { return {ms, ms_text(ms)}; }
Cell share_cell(double share) { return {share, percent_text(share)}; }

TableWriter::TableWriter(std::FILE* out, OutputFormat format, std::vector<Column> columns)
    : out_(out), format_(format), color_(shows_color(out)), columns_(std::move(columns)) {
  widths_.reserve(columns_.size());
  for (const Column& column : columns_) {
    widths_.push_back(std::max(column.width, display_width(column.title)));
  }
}

void TableWriter::header(const nlohmann::ordered_json& facts,
                         const std::vector<std::string>& lines) {
  document_ = facts;
  if (!is_text(format_)) return;
  // Markdown joins neighbouring lines unless each ends with two blanks.
  const char* line_end = format_ == OutputFormat::kMarkdown ? "  \n" : "\n";
  for (const std::string& line : lines) write(line + line_end);
  write("\n");
}

void TableWriter::row(const std::vector<Cell>& cells) {
  switch (format_) {
    case OutputFormat::kTable:
    case OutputFormat::kMarkdown:
      if (!std::exchange(titles_written_, true)) text_titles();
      text_row(cells);
      break;
    case OutputFormat::kCsv:
      if (!std::exchange(titles_written_, true)) csv_titles();
      csv_row(cells);
      break;
    case OutputFormat::kJson:
      rows_.push_back(json_row(cells));
      break;
    case OutputFormat::kJsonl:
      write(json_text(json_row(cells), -1) + "\n");
      break;
  }
  std::fflush(out_);
}

void TableWriter::total(const std::vector<Cell>& cells) {
  if (is_text(format_)) {
    if (!std::exchange(titles_written_, true)) text_titles();
    if (format_ == OutputFormat::kTable) rule();
    text_row(cells);
  } else if (format_ == OutputFormat::kJson) {
    document_["total"] = json_row(cells);
  }
}

void TableWriter::note(std::string_view text) {
  if (is_text(format_)) write(fmt::format("{}\n", text));
}

void TableWriter::finish(std::string_view key) {
  if (format_ == OutputFormat::kCsv && !std::exchange(titles_written_, true)) csv_titles();
  if (format_ == OutputFormat::kJson) {
    const nlohmann::ordered_json total = document_.value("total", nlohmann::ordered_json());
    document_.erase("total");
    document_[std::string(key)] = rows_;
    if (!total.is_null()) document_["total"] = total;
    write(json_text(document_, 2) + "\n");
  }
  std::fflush(out_);
}

void TableWriter::text_titles() {
  std::vector<Cell> titles;
  for (const Column& column : columns_) titles.push_back(text_cell(column.title, Style::kBold));
  text_row(titles);
  rule();
}

void TableWriter::text_row(const std::vector<Cell>& cells) {
  const bool markdown = format_ == OutputFormat::kMarkdown;
  std::string line = markdown ? "|" : "";
  for (size_t i = 0; i < columns_.size(); ++i) {
    if (columns_[i].title.empty()) continue;
    const std::string cell =
        padded(cells[i].text, widths_[i], columns_[i].align, cells[i].style, color_ && !markdown);
    if (markdown) {
      line += " " + cell + " |";
    } else {
      line += (line.empty() ? "" : "  ") + cell;
    }
  }
  write(without_trailing_blanks(std::move(line)) + "\n");
}

void TableWriter::rule() {
  const bool markdown = format_ == OutputFormat::kMarkdown;
  std::string line = markdown ? "|" : "";
  for (size_t i = 0; i < columns_.size(); ++i) {
    if (columns_[i].title.empty()) continue;
    const size_t width = static_cast<size_t>(widths_[i]);
    if (!markdown) {
      line += (line.empty() ? "" : "  ") + std::string(width, '-');
    } else if (columns_[i].align == Align::kRight) {
      line += std::string(width + 1, '-') + ":|";
    } else {
      line += ":" + std::string(width + 1, '-') + "|";
    }
  }
  write(line + "\n");
}

void TableWriter::csv_titles() {
  std::string line;
  for (const Column& column : columns_) {
    if (!column.key.empty()) line += (line.empty() ? "" : ",") + csv_field(column.key);
  }
  write(line + "\n");
}

void TableWriter::csv_row(const std::vector<Cell>& cells) {
  std::string line;
  const char* separator = "";
  for (size_t i = 0; i < columns_.size(); ++i) {
    if (columns_[i].key.empty()) continue;
    line += separator + csv_field(cells[i].value);
    separator = ",";
  }
  write(line + "\n");
}

nlohmann::ordered_json TableWriter::json_row(const std::vector<Cell>& cells) const {
  nlohmann::ordered_json row = nlohmann::ordered_json::object();
  for (size_t i = 0; i < columns_.size(); ++i) {
    if (!columns_[i].key.empty()) row[columns_[i].key] = cells[i].value;
  }
  return row;
}

void TableWriter::write(std::string_view text) { fmt::print(out_, "{}", text); }

std::string json_text(const nlohmann::ordered_json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace conclave::tool
