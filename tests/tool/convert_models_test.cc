// Converts tiny models of every family, and quantised ones, and compares what this library's reader
// makes of the result with the report.
#include "convert_tool.h"
#include "support/case_name.h"
#include "support/in_sample.h"

#include "conclave/checkpoint.h"
#include "conclave/format.h"
#include "conclave/quantise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::array kTinyModels = {"mixtral-tiny", "qwen3-moe-tiny", "olmoe-tiny",
                                    "qwen2-moe-tiny"};
std::vector<WeightForm> written_forms() {
  std::vector<WeightForm> forms;
  for (const WeightForm& form : weight_forms()) {
    const bool written =
        Quantiser::supports({.codes = form.dtype, .quant = form.quant}) && !form.method.empty();
    if (written) forms.push_back(form);
  }
  return forms;
}

// Whether the reader knows the form at all, of a model that synth writes.
bool is_read(const WeightForm& form) {
  const ScratchDirectory scratch;
  const std::string model = (scratch / "model").string();
  const ToolResult written = run_tool({"synth", "-E", "2", "-k", "1", "-H", "128", "-I", "128",
                                       "--dtype", std::string(form.name), model});
  EXPECT_EQ(written.exit_code, 0) << written.err;
  return run_tool({"inspect", model}).out.find("cannot run") == std::string::npos;
}

// Whether the method has the form for rows of these widths: words are whole, and so are groups.
bool fits(const WeightForm& form, const MoeSpec& spec) {
  std::set<int64_t> widths = {spec.hidden_size, spec.intermediate_size};
  if (spec.shared.mode != SharedMode::kNone) widths.insert(spec.shared.intermediate_size);
  const QuantSpec& quant = form.quant;
  const bool groups = quant.weights == WeightScale::kBlock && quant.block_rows == 1;
  return std::ranges::all_of(widths, [&](int64_t width) {
    const int64_t element = form.packed_in ? bit_size(*form.packed_in) : 8;
    const bool packed = width * bit_size(form.dtype) % element == 0;
    return packed && (!groups || width % quant.block_cols == 0);
  });
}

// The errors that the report states are those of the values that the reader gives.
void expect_reported_errors(const std::string& source, const fs::path& out) {
  const Checkpoint before = Checkpoint::open(source);
  const Checkpoint after = Checkpoint::open(out);
  const Json report = read_json(out / "conversion.json");
  std::map<std::string, double> reported;
  for (const Json& matrix : report["matrices"]) {
    reported[matrix["name"].get<std::string>()] = matrix["relative_error"].get<double>();
    // The quotient that is rounded to a code of 127 steps at most was rounded to float32 before.
    EXPECT_LE(matrix["worst_steps"].get<double>(), 0.5 + 127 * 0x1p-24) << matrix;
  }
  std::map<std::string, QuantiseError> found;  // a linear layer may hold two matrices
  for (const CheckpointLayer& layer : before.layers()) {
    for (const StoredMatrix& matrix : after.stored_matrices(layer.index)) {
      SCOPED_TRACE(matrix.module);
      found[matrix.module].add(error_of(values_of(before, layer.index, matrix.id, matrix.expert),
                                        values_of(after, layer.index, matrix.id, matrix.expert)));
    }
  }
  EXPECT_EQ(found.size(), reported.size());
  for (const auto& [module, error] : found) {
    EXPECT_NEAR(error.relative(), reported.at(module), 1e-6) << module;
  }
}

// Three matrices in a row and two quantisations of rows add up as independent errors do; four
// times their root mean square is beyond every row.
double output_bar(const Json& report, const WeightForm& form) {
  double weights = 0;
  for (const Json& matrix : report["matrices"]) {
    weights = std::max(weights, matrix["relative_error"].get<double>());
  }
  // A row's relative error: e4m3 is off by 2^-4 at most, integers by half a step of amax / 127,
  // where amax is at most the length of the row.
  const bool coded = form.quant.activations != ActivationScale::kNone;
  const double rows = !coded ? 0 : form.dtype == DType::kF8E4M3 ? 0x1p-4 : 10.0 / 127;
  return 4 * std::sqrt(3 * weights * weights + 2 * rows * rows);
}

void expect_layers(const Checkpoint& model, const WeightForm& form) {
  for (const CheckpointLayer& layer : model.layers()) {
    EXPECT_TRUE(layer.support) << layer.support.reason();
    EXPECT_EQ(layer.spec.weight_dtype, form.dtype);
    EXPECT_EQ(layer.spec.quant.weights, form.quant.weights);
    EXPECT_EQ(layer.spec.quant.activations, form.quant.activations);
  }
}

void expect_outputs(const Json& report, const WeightForm& form) {
  EXPECT_FALSE(report["layers"].empty());
  for (const Json& layer : report["layers"]) {
    EXPECT_LE(layer["worst"].get<double>(), output_bar(report, form)) << layer["layer"];
    EXPECT_LE(layer["median"].get<double>(), layer["worst"].get<double>());
  }
}

// Converts to every form; those that do not fit the model are refused and leave nothing behind.
void expect_every_form(const std::string& source) {
  const MoeSpec spec = Checkpoint::open(source).layers().front().spec;
  size_t place = first_place();
  for (const WeightForm& form : written_forms()) {
    if (!in_sample(place++, 3)) continue;
    SCOPED_TRACE(form.name);
    const ScratchDirectory scratch;
    const fs::path out = scratch / "out";
    const ToolResult result = convert(source, out, std::string(form.name));
    if (!fits(form, spec) || !is_read(form)) {
      EXPECT_EQ(result.exit_code, 3) << result.out << result.err;
      EXPECT_NE(result.err.find("[kUnsupported]"), std::string::npos) << result.err;
      EXPECT_TRUE(fs::is_empty(scratch.path()));
      continue;
    }
    ASSERT_EQ(result.exit_code, 0) << result.err;
    expect_layers(Checkpoint::open(out), form);
    expect_reported_errors(source, out);
    expect_outputs(read_json(out / "conversion.json"), form);
    expect_verified(out);
  }
}

class ConvertTiny : public ::testing::TestWithParam<const char*> {};

TEST_P(ConvertTiny, EveryForm_IsReadAndAgreesWithItsReport) {
  expect_every_form(bundled(GetParam()));
}

TEST(Convert, RowsOfWholeGroups_TakeEveryForm) {
  const ScratchDirectory scratch;
  const std::string model = (scratch / "model").string();
  const ToolResult written = run_tool({"synth", "-E", "4", "-k", "2", "-H", "256", "-I", "128",
                                       "--shared", "384", "--model-type", "qwen2_moe", model});
  ASSERT_EQ(written.exit_code, 0) << written.err;
  expect_every_form(model);
}

INSTANTIATE_TEST_SUITE_P(Convert, ConvertTiny, ::testing::ValuesIn(kTinyModels),
                         [](const auto& instance) { return case_name(instance.param); });

class ConvertFamily : public ::testing::TestWithParam<std::string> {};

// Every family's golden model either becomes a model that runs, or is refused with the reason.
TEST_P(ConvertFamily, GoldenModel_IsConvertedOrRefused) {
  const ScratchDirectory scratch;
  const fs::path out = scratch / "out";
  const std::string source = "testdata/models/" + GetParam();
  const ToolResult result = convert(source, out, "int8-channel");
  if (result.exit_code != 0) {
    EXPECT_EQ(result.exit_code, 3) << result.err;
    EXPECT_NE(result.err.find("[kUnsupported]"), std::string::npos) << result.err;
    EXPECT_TRUE(fs::is_empty(scratch.path()));
    return;
  }
  expect_reported_errors(source, out);
  expect_verified(out, 4);
}

std::vector<std::string> golden_models() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator("testdata/models")) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Models, ConvertFamily, ::testing::ValuesIn(golden_models()),
                         [](const auto& instance) { return case_name(instance.param); });

TEST(Convert, QuantisedModel_BecomesAnotherForm) {
  for (const char* model : {"qwen3_moe-compressed-int4-group32", "qwen3_moe-compressed-weight-only",
                            "mixtral-modelopt-channel", "qwen3_moe-fp8-stacked"}) {
    SCOPED_TRACE(model);
    const std::string source = "testdata/quantised/" + std::string(model);
    const ScratchDirectory scratch;
    const fs::path out = scratch / "out";
    const ToolResult result = convert(source, out, "int8-channel");
    ASSERT_EQ(result.exit_code, 0) << result.err;
    expect_reported_errors(source, out);
    EXPECT_FALSE(fs::exists(out / "hf_quant_config.json"));
    const ToolResult verified = run_tool({"verify", out.string()});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
}

}  // namespace
}  // namespace conclave::testing
