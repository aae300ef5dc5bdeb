// Lists the tensors of a method, and what it leaves as it is, for those who load tensors by names
// of their own.
#include "checkpoint/methods/tensor_rows.h"
#include "checkpoint/quantization.h"
#include "io/json.h"

#include "conclave/error.h"
#include "conclave/methods.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

using checkpoint::MatrixForm;
using checkpoint::QuantizedWeights;
using checkpoint::TensorRow;

// So many more rows or columns lengthen every axis that they lie along, whatever a word holds.
constexpr int64_t kMore = 1 << 20;

io::JsonDocument parse(const std::string& config) {
  return io::JsonDocument::parse(config, "quantization_config", io::kConfigLimits);
}

int axis_that_differs(const std::vector<int64_t>& one, const std::vector<int64_t>& other) {
  const auto [at, found] = std::ranges::mismatch(one, other);
  return at == one.end() ? -1 : static_cast<int>(at - one.begin());
}

MethodTensor tensor_of(const TensorRow& row, const QuantizedWeights& quant, int64_t rows,
                       int64_t cols) {
  const MatrixForm form = matrix_form(quant, rows, cols);
  const std::vector<int64_t> shape = shape_of(row, form);
  const auto axis = [&](int64_t more_rows, int64_t more_cols) {
    const MatrixForm larger = matrix_form(quant, rows + more_rows, cols + more_cols);
    return axis_that_differs(shape, shape_of(row, larger));
  };
  return {.name = row.name,
          .use = row.use,
          .plane = row.plane,
          .dtypes = types_of(row, form),
          .shape = shape,
          .rows_axis = axis(kMore, 0),
          .cols_axis = axis(0, kMore)};
}

// Adds what one key has: names, or rules for modules, of which those that leave some out count.
void add_kept(const io::JsonValue& value, std::vector<std::string>& modules) {
  constexpr std::string_view kLeavesOut = "-:";
  if (value.is_bool()) return;  // other methods have flags of such names
  if (!value.is_object()) {
    for (const io::JsonValue& name : value.items()) modules.emplace_back(name.as_string());
    return;
  }
  for (const io::JsonMember& rule : value.members()) {
    if (!rule.key.starts_with(kLeavesOut)) continue;
    modules.push_back("re:" + std::string(rule.key.substr(kLeavesOut.size())));
  }
}

// The keys of all methods, each once.
std::vector<std::string_view> kept_keys() {
  std::vector<std::string_view> keys;
  for (const checkpoint::Method& method : checkpoint::known_methods()) {
    for (const std::string_view key : method.kept) {
      if (std::ranges::find(keys, key) == keys.end()) keys.push_back(key);
    }
  }
  return keys;
}

void add_kept_of(const io::JsonValue& config, std::vector<std::string>& modules) {
  for (const std::string_view key : kept_keys()) {
    if (const auto value = config.find_set(key)) add_kept(*value, modules);
  }
}

}  // namespace

std::vector<std::string> checkpoint_methods() {
  std::vector<std::string> names;
  for (const checkpoint::Method& method : checkpoint::known_methods()) {
    const bool is_new = std::ranges::find(names, method.name) == names.end();
    if (is_new) names.emplace_back(method.name);
  }
  return names;
}

MethodLayout method_layout(const std::string& config, std::string_view matrix, int64_t rows,
                           int64_t cols, std::span<const std::string> modules) {
  const io::JsonDocument document = parse(config);
  const auto found = checkpoint::read_quantization(document.root(), {}, modules);
  MethodLayout layout{.method = found.method,
                      .reason = found.reason,
                      .kernel_order = found.kernel_order,
                      .leaves_out = found.leaves_out};
  if (!found.weights) {
    if (layout.reason.empty() && !layout.leaves_out) layout.reason = "the method is not known";
    return layout;
  }
  const QuantizedWeights& quant = *found.weights;
  layout.codes = quant.element;
  layout.code_bits = quant.stored.bits == 0 ? bit_size(quant.element) : quant.stored.bits;
  layout.quant = quant.spec;
  layout.has_module_schemes = quant.by_module != nullptr;
  for (const TensorRow& row : tensor_rows(quant, found.method, matrix)) {
    layout.tensors.push_back(tensor_of(row, quant, rows, cols));
  }
  return layout;
}

std::vector<std::string> kept_modules(const std::string& config) {
  const io::JsonDocument document = parse(config);
  const io::JsonValue root = document.root();
  std::vector<std::string> modules;
  add_kept_of(root, modules);
  const auto nested = root.find_set("quantization");
  if (nested && nested->is_object()) add_kept_of(*nested, modules);
  return modules;
}

}  // namespace conclave::inline v0
