#include "options.h"

#include "support/cuda/cases.h"

#include <stdexcept>
#include <string_view>

namespace conclave::bench {

namespace {

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    parts.emplace_back(text.substr(0, comma));
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
  }
  return parts;
}

}  // namespace

Options parse_options(int argc, char** argv) {
  Options options;
  for (const testing::LayerCase& c : testing::layer_cases()) {
    const bool by_name_only =
        c.name.starts_with("tiny") || c.format == "f16" || c.format == "fp8channel";
    if (!by_name_only) options.cases.push_back(c.name);
  }
  options.variants = {"d1", "d2", "logits", "zipf", "routing"};
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) throw std::runtime_error(name + " needs a value");
    const std::string value = argv[i + 1];
    if (name == "--cases") {
      options.cases = split(value);
    } else if (name == "--tokens") {
      options.tokens.clear();
      for (const std::string& text : split(value)) options.tokens.push_back(std::stoll(text));
    } else if (name == "--variants") {
      options.variants = split(value);
    } else if (name == "--seconds") {
      options.seconds_per_cell = std::stod(value);
    } else if (name == "--plans") {
      options.print_plans = value != "0";
    } else {
      throw std::runtime_error("unknown option " + name +
                               "; --cases, --tokens, --variants, --seconds, --plans");
    }
  }
  return options;
}

}  // namespace conclave::bench
