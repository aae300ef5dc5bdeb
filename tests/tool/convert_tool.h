// Runs conclave convert with few tokens, and compares models before and after it.
#pragma once

#include "tool_process.h"

#include "conclave/checkpoint.h"
#include "conclave/quantise.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

namespace conclave::testing {

inline ToolResult convert(const std::string& source, const std::filesystem::path& out,
                          const std::string& form, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"convert", source,     out.string(), "--format",
                                        form,      "--tokens", "8"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_tool(arguments);
}

inline nlohmann::json read_json(const std::filesystem::path& path) {
  return nlohmann::json::parse(read_text(path));
}

inline std::vector<float> values_of(const Checkpoint& model, int64_t layer, WeightId id,
                                    int64_t expert) {
  const auto source = model.layer_source(layer);
  const WeightInfo info = source->describe(id);
  std::vector<float> values(static_cast<size_t>(info.rows * info.cols));
  read_values(model.layer(layer).spec.quant, *source, id, expert, {0, info.rows, 0, info.cols},
              values);
  return values;
}

// What reports state of a matrix, found from its values.
inline QuantiseError error_of(const std::vector<float>& expected,
                              const std::vector<float>& actual) {
  EXPECT_EQ(actual.size(), expected.size());
  QuantiseError error;
  for (size_t i = 0; i < std::min(actual.size(), expected.size()); ++i) {
    error.squared_error += std::pow(double{actual[i]} - double{expected[i]}, 2);
    error.squared_values += double{expected[i]} * double{expected[i]};
  }
  return error;
}

// The layers of the model agree with float64 of its weights.
inline void expect_verified(const std::filesystem::path& model, int tokens = 8) {
  const ToolResult verified =
      run_tool({"verify", model.string(), "--tokens", std::to_string(tokens)});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
}

}  // namespace conclave::testing
