#include "conversion.h"

#include "arrays.h"
#include "context.h"
#include "load_scope.h"
#include "names.h"

#include "conclave/convert.h"
#include "conclave/error.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

Tensor copy_of(const ConstTensorView& view) {
  Tensor copy(view.dtype, view.shape);
  const int64_t rows = view.shape.rank() == 2 ? view.shape[0] : 1;
  if (copy.size_bytes() == 0 || rows == 0) return copy;
  const size_t row_bytes = copy.size_bytes() / static_cast<size_t>(rows);
  const int64_t stride = view.row_stride == 0 ? view.shape[view.shape.rank() - 1] : view.row_stride;
  const size_t stride_bytes = static_cast<size_t>(stride * byte_size(view.dtype));
  const auto* from = static_cast<const std::byte*>(view.data);
  for (int64_t row = 0; row < rows; ++row) {
    const auto index = static_cast<size_t>(row);
    std::memcpy(copy.as<std::byte>() + index * row_bytes, from + index * stride_bytes, row_bytes);
  }
  return copy;
}

std::optional<Tensor> copy_of(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return copy_of(tensor->view());
}

// Requires the GIL.
std::optional<Tensor> matrix_of(const nb::dict& arrays, const char* key, const char* name) {
  if (!arrays.contains(key)) return std::nullopt;
  const Array array(arrays[key], name);
  array.require_device({});
  return copy_of(array.matrix("[T, H]"));
}

std::optional<Tensor> vector_of(const nb::dict& arrays, const char* key, const char* name) {
  if (!arrays.contains(key)) return std::nullopt;
  const Array array(arrays[key], name);
  array.require_device({});
  return copy_of(array.vector("[T]"));
}

// Rows of the caller, copied, so that no array is read while the GIL is away.
class GivenRows final : public RowSource {
 public:
  // Entries are (layer, arrays by name); those of layer -1 are for every layer without its own.
  explicit GivenRows(const std::vector<std::pair<int64_t, nb::dict>>& given) {
    for (const auto& [layer, arrays] : given) {
      std::optional<Tensor> hidden = matrix_of(arrays, "hidden", "rows.hidden");
      if (!hidden) {
        throw Error(ErrorCode::kInvalidArgument,
                    {.what = "rows have no hidden states", .tensor = "rows.hidden"});
      }
      rows_[layer] = {.hidden = std::move(*hidden),
                      .router_input = matrix_of(arrays, "router_input", "rows.router_input"),
                      .residual_input = matrix_of(arrays, "residual_input", "rows.residual_input"),
                      .token_ids = vector_of(arrays, "token_ids", "rows.token_ids")};
    }
  }

  std::string name() const override { return "arrays"; }

  void check(int64_t layer, const MoeSpec& spec) const override {
    const ComparedRows& rows = of(layer);
    const int64_t tokens = rows.hidden.shape()[0];
    check_matrix("rows.hidden", rows.hidden, tokens, spec);
    if (rows.router_input) check_matrix("rows.router_input", *rows.router_input, tokens, spec);
    if (rows.residual_input) {
      check_matrix("rows.residual_input", *rows.residual_input, tokens, spec);
    }
    if (spec.router.vocab_size > 0 && !rows.token_ids) {
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "layer " + std::to_string(layer) + " chooses experts by the token's id",
                   .tensor = "rows.token_ids"});
    }
    if (rows.token_ids) check_ids(*rows.token_ids, tokens);
  }

  ComparedRows load(int64_t layer, const MoeSpec&) const override {
    const ComparedRows& rows = of(layer);
    return {.hidden = copy_of(rows.hidden.view()),
            .router_input = copy_of(rows.router_input),
            .residual_input = copy_of(rows.residual_input),
            .token_ids = copy_of(rows.token_ids)};
  }

 private:
  const ComparedRows& of(int64_t layer) const {
    auto found = rows_.find(layer);
    if (found == rows_.end()) found = rows_.find(-1);
    if (found != rows_.end()) return found->second;
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a layer that is converted has no rows",
                 .tensor = "rows",
                 .expected = "rows of layer " + std::to_string(layer)});
  }

  static void check_matrix(const char* name, const Tensor& tensor, int64_t tokens,
                           const MoeSpec& spec) {
    const DType type = tensor.dtype();
    if (type != DType::kF32 && type != DType::kF16 && type != DType::kBF16) {
      throw Error(ErrorCode::kDType, {.what = "rows have a type that layers do not take",
                                      .tensor = name,
                                      .expected = "float32, float16 or bfloat16",
                                      .found = std::string(dtype_to_python(type))});
    }
    const Shape expected = {tokens, spec.hidden_size};
    if (tokens > 0 && tensor.shape() == expected) return;
    throw Error(
        ErrorCode::kShape,
        {.what = "rows have a shape that the layer does not take",
         .tensor = name,
         .expected = tokens > 0 ? expected.to_string()
                                : "[T, " + std::to_string(spec.hidden_size) + "], T of 1 or more",
         .found = tensor.shape().to_string()});
  }

  static void check_ids(const Tensor& ids, int64_t tokens) {
    if (ids.dtype() != DType::kI32 && ids.dtype() != DType::kI64) {
      throw Error(ErrorCode::kDType, {.what = "ids of tokens have a type that layers do not take",
                                      .tensor = "rows.token_ids",
                                      .expected = "int32 or int64",
                                      .found = std::string(dtype_to_python(ids.dtype()))});
    }
    if (ids.shape() == Shape{tokens}) return;
    throw Error(ErrorCode::kShape, {.what = "each row has one id of a token",
                                    .tensor = "rows.token_ids",
                                    .expected = Shape{tokens}.to_string(),
                                    .found = ids.shape().to_string()});
  }

  std::map<int64_t, ComparedRows> rows_;
};

nb::dict matrix_to_dict(const ConvertedMatrix& matrix) {
  nb::dict dict;
  dict["name"] = matrix.name;
  dict["layer"] = matrix.layer;
  dict["kind"] = matrix.kind;
  dict["rows"] = matrix.rows;
  dict["cols"] = matrix.cols;
  dict["format"] = matrix.format;
  dict["bytes_before"] = matrix.bytes_before;
  dict["bytes_after"] = matrix.bytes_after;
  dict["relative_error"] = matrix.error.relative();
  dict["worst_steps"] = matrix.error.worst_steps;
  return dict;
}

nb::dict layer_to_dict(const ConvertedLayer& layer) {
  nb::dict dict;
  dict["layer"] = layer.layer;
  dict["median"] = layer.median;
  dict["worst"] = layer.worst;
  dict["worst_token"] = layer.worst_token;
  dict["tokens"] = nb::tuple(nb::cast(layer.tokens));
  return dict;
}

nb::dict report_to_dict(const ConversionReport& report) {
  QuantiseError all;
  nb::list matrices;
  nb::list layers;
  for (const ConvertedMatrix& matrix : report.matrices) {
    all.add(matrix.error);
    matrices.append(matrix_to_dict(matrix));
  }
  for (const ConvertedLayer& layer : report.layers) layers.append(layer_to_dict(layer));
  nb::dict dict;
  dict["source"] = report.source;
  dict["destination"] = report.destination;
  dict["model"] = report.model.string();
  dict["model_type"] = report.model_type;
  dict["format"] = report.format;
  dict["scales"] = report.scales;
  dict["tokens"] = report.tokens;
  dict["seed"] = report.seed;
  dict["bytes_before"] = report.bytes_before;
  dict["bytes_after"] = report.bytes_after;
  dict["shards"] = report.shards;
  dict["shards_kept"] = report.shards_kept;
  dict["relative_error"] = all.relative();
  dict["matrices"] = matrices;
  dict["layers"] = layers;
  dict["left_out"] = nb::tuple(nb::cast(report.left_out));
  dict["incomplete"] = report.incomplete;
  dict["no_tokenizer"] = report.no_tokenizer;
  dict["tensors_left_out"] = nb::tuple(nb::cast(report.tensors_left_out));
  return dict;
}

struct Given {
  std::optional<std::string> container;
  std::vector<std::pair<std::string, std::string>> keep;
  std::string scales;
  bool replace = false;
  bool keep_unfinished = false;
};

void take(const Given& given, ConversionRequest& request) {
  if (given.container) {
    request.container = parse_word<ModelContainer>("container", *given.container);
  }
  for (const auto& [pattern, format] : given.keep) {
    request.keep.push_back({.pattern = pattern, .format = format});
  }
  request.scales = parse_word<ScaleRule>("scales", given.scales);
  request.existing = given.replace ? ExistingModel::kReplace : ExistingModel::kRefuse;
  request.unfinished = given.keep_unfinished ? UnfinishedModel::kKeep : UnfinishedModel::kRemove;
}

// The caller's function is called on the caller's thread; what it raises goes through the library.
void tell_through(const nb::object& progress, ConversionRequest& request) {
  if (progress.is_none()) return;
  request.progress = [&progress](std::string_view phase, int64_t done, int64_t total) {
    const nb::gil_scoped_acquire held;
    progress(phase, done, total);
  };
}

nb::dict convert(const PyContext& context, const std::string& source,
                 const std::string& destination, const std::string& format,
                 std::optional<std::string> container, std::vector<int64_t> layers,
                 std::vector<std::pair<std::string, std::string>> keep, const std::string& scales,
                 uint64_t shard_bytes, int64_t tokens, uint64_t seed,
                 const std::vector<std::pair<int64_t, nb::dict>>& rows, bool replace,
                 bool keep_unfinished, bool report, const nb::object& progress) {
  ConversionRequest request{.source = source,
                            .destination = destination,
                            .format = format,
                            .layers = std::move(layers),
                            .shard_bytes = shard_bytes,
                            .tokens = tokens,
                            .seed = seed,
                            .writes_report = report};
  take({.container = std::move(container),
        .keep = std::move(keep),
        .scales = scales,
        .replace = replace,
        .keep_unfinished = keep_unfinished},
       request);
  const GivenRows given(rows);
  if (!rows.empty()) request.rows = &given;
  tell_through(progress, request);
  return report_to_dict(
      run_interruptible([&] { return convert_model(context.context(), request); }));
}

}  // namespace

void bind_conversion(nb::module_& module) {
  module.def("convert_model", &convert, nb::arg("context"), nb::arg("source"),
             nb::arg("destination"), nb::arg("format"), nb::arg("container").none(),
             nb::arg("layers"), nb::arg("keep"), nb::arg("scales"), nb::arg("shard_bytes"),
             nb::arg("tokens"), nb::arg("seed"), nb::arg("rows"), nb::arg("replace"),
             nb::arg("keep_unfinished"), nb::arg("report"), nb::arg("progress").none(),
             "Writes a model with its experts in another form; the report as a dictionary.");
  module.def(
      "conversion_formats",
      [] {
        nb::list rows;
        for (const ConversionFormat& format : conversion_formats()) {
          nb::dict row;
          row["name"] = format.name;
          row["options"] = format.options;
          row["container"] = word_of(format.container);
          rows.append(row);
        }
        return nb::typed<nb::list, nb::dict>(std::move(rows));
      },
      "The forms that conversions write.");
}

}  // namespace conclave::python
