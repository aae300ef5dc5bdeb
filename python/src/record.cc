#include "record.h"

#include "arrays.h"
#include "fields.h"
#include "names.h"

#include "conclave/error.h"
#include "conclave/routing_record.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

// The members of a RecordedLayer, in their order.
using LayerFields = std::tuple<int64_t, int64_t, int64_t, uint64_t>;

// Keys of tokens, [T, 2] int64; none for None.
std::vector<TokenKey> tokens_of(nb::handle object) {
  if (object.is_none()) return {};
  const Array array(object, "tokens");
  array.require_device({});
  const ConstTensorView view = array.matrix("[T, 2]");
  if (view.dtype != DType::kI64 || view.shape[1] != 2) {
    throw Error(view.dtype != DType::kI64 ? ErrorCode::kDType : ErrorCode::kShape,
                {.what = "tokens are pairs of sequence and position",
                 .tensor = "tokens",
                 .expected = "int64 [T, 2]",
                 .found = std::string(dtype_to_python(view.dtype)) + " " + view.shape.to_string()});
  }
  const int64_t stride = view.row_stride != 0 ? view.row_stride : 2;
  const auto* const values = static_cast<const int64_t*>(view.data);
  std::vector<TokenKey> tokens;
  for (int64_t row = 0; row < view.shape[0]; ++row) {
    tokens.push_back({.sequence = values[row * stride], .position = values[row * stride + 1]});
  }
  return tokens;
}

const Array& on_host(const Array& array) {
  array.require_device({});
  return array;
}

void record(RoutingRecorder& self, int64_t layer, nb::handle topk_ids, nb::handle topk_weights,
            nb::handle tokens) {
  const Array ids(topk_ids, "topk_ids");
  const Array weights(topk_weights, "topk_weights");
  const std::vector<TokenKey> keys = tokens_of(tokens);
  const ConstTensorView id_view = on_host(ids).matrix("[T, top_k]");
  const ConstTensorView weight_view = on_host(weights).matrix("[T, top_k]");
  const nb::gil_scoped_release released;
  self.record(layer, id_view, weight_view, keys);
}

void find(const RoutingReplay& self, int64_t layer, nb::handle tokens, nb::handle topk_ids,
          nb::handle topk_weights) {
  const std::optional<Array> ids = optional_array(topk_ids, "topk_ids");
  const std::optional<Array> weights = optional_array(topk_weights, "topk_weights");
  const auto view = [](const std::optional<Array>& array) {
    return array ? on_host(*array).writable_matrix("[T, top_k]") : TensorView();
  };
  const TensorView id_view = view(ids);
  const TensorView weight_view = view(weights);
  const std::vector<TokenKey> keys = tokens_of(tokens);
  const nb::gil_scoped_release released;
  self.find(layer, keys, id_view, weight_view);
}

nb::dict describe(const RecordedRows& rows) {
  nb::dict dict;
  dict["layer"] = rows.layer.layer;
  dict["num_tokens"] = rows.num_tokens();
  dict["num_slots"] = rows.layer.num_slots;
  dict["num_ids"] = rows.layer.num_ids;
  dict["spec_hash"] = rows.layer.spec_hash;
  dict["dropped_tokens"] = rows.dropped_tokens;
  return dict;
}

template <class Element>
void copy_out(const std::vector<Element>& from, const TensorView& to, DType dtype, int64_t rows,
              int64_t cols) {
  if (to.dtype != dtype || to.shape != Shape{rows, cols} ||
      (to.row_stride != 0 && to.row_stride != cols)) {
    throw Error(ErrorCode::kShape, {.what = "an array for rows of a record does not fit",
                                    .expected = Shape{rows, cols}.to_string(),
                                    .found = to.shape.to_string()});
  }
  std::copy(from.begin(), from.end(), static_cast<Element*>(to.data));
}

void copy_rows(const RoutingRecord& self, int64_t layer, nb::handle tokens, nb::handle ids,
               nb::handle weights) {
  const RecordedRows* const rows = self.find(layer);
  if (rows == nullptr) {
    throw Error(
        ErrorCode::kInvalidArgument,
        {.what = "this layer was not recorded", .tensor = "layer", .found = std::to_string(layer)});
  }
  const int64_t count = rows->num_tokens();
  if (count == 0) return;
  std::vector<int64_t> keys;
  for (const TokenKey& token : rows->tokens) {
    keys.push_back(token.sequence);
    keys.push_back(token.position);
  }
  const Array token_array(tokens, "tokens");
  const Array id_array(ids, "topk_ids");
  const Array weight_array(weights, "topk_weights");
  const int64_t slots = rows->layer.num_slots;
  copy_out(keys, token_array.writable_matrix("[T, 2]"), DType::kI64, count, 2);
  copy_out(rows->topk_ids, id_array.writable_matrix("[T, top_k]"), DType::kI32, count, slots);
  copy_out(rows->topk_weights, weight_array.writable_matrix("[T, top_k]"), DType::kF32, count,
           slots);
}

nb::tuple pair_of(const TokenKey& token) { return nb::make_tuple(token.sequence, token.position); }

nb::dict dict_of(const LayerDifferences& layer) {
  nb::dict dict;
  dict["layer"] = layer.layer;
  dict["compared"] = layer.compared;
  dict["only_in_first"] = layer.only_in_first;
  dict["only_in_second"] = layer.only_in_second;
  dict["other_experts"] = layer.other_experts;
  dict["reordered"] = layer.reordered;
  dict["other_weights"] = layer.other_weights;
  dict["worst_weight_difference"] = layer.worst_weight_difference;
  dict["worst_token"] = pair_of(layer.worst_token);
  dict["same_spec"] = layer.same_spec;
  return dict;
}

nb::dict compare(const RoutingRecord& first, const RoutingRecord& second, int64_t most_examples) {
  const RoutingComparison found = compare_routing(first, second, most_examples);
  nb::list layers;
  for (const LayerDifferences& layer : found.layers) layers.append(dict_of(layer));
  nb::list examples;
  for (const RoutingDifference& difference : found.examples) {
    nb::dict example;
    example["layer"] = difference.layer;
    example["token"] = pair_of(difference.token);
    example["first_ids"] = nb::tuple(nb::cast(difference.first_ids));
    example["second_ids"] = nb::tuple(nb::cast(difference.second_ids));
    example["weight_difference"] = difference.weight_difference;
    examples.append(example);
  }
  nb::dict dict;
  dict["layers"] = layers;
  dict["only_in_first"] = nb::tuple(nb::cast(found.only_in_first));
  dict["only_in_second"] = nb::tuple(nb::cast(found.only_in_second));
  dict["examples"] = examples;
  dict["equal"] = found.equal();
  return dict;
}

void bind_recorder(nb::module_& module) {
  nb::class_<RoutingRecorder> recorder(module, "RoutingRecorder", "Rings of recorded routing.");
  recorder.def(
      "__init__",
      [](RoutingRecorder* self, const std::vector<LayerFields>& fields, int64_t capacity,
         const std::string& when_full, std::string model, std::string model_type) {
        std::vector<RecordedLayer> layers;
        for (const auto& [layer, num_ids, num_slots, spec_hash] : fields) {
          layers.push_back({layer, num_ids, num_slots, spec_hash});
        }
        new (self)
            RoutingRecorder(layers, {.capacity = capacity,
                                     .when_full = parse_word<WhenFull>("when_full", when_full),
                                     .model = std::move(model),
                                     .model_type = std::move(model_type)});
      },
      nb::arg("layers"), nb::arg("capacity"), nb::arg("when_full"), nb::arg("model"),
      nb::arg("model_type"));
  recorder.def("record", &record, nb::arg("layer"), nb::arg("topk_ids"), nb::arg("topk_weights"),
               nb::arg("tokens").none(), "Adds rows of a layer.");
  recorder.def("recorded_tokens", &RoutingRecorder::recorded_tokens, nb::arg("layer"),
               "Tokens that a layer was given.");
  recorder.def("dropped_tokens", &RoutingRecorder::dropped_tokens, nb::arg("layer"),
               "Those of them that are gone.");
  recorder.def("snapshot", &RoutingRecorder::snapshot, nb::call_guard<nb::gil_scoped_release>(),
               "A copy of all rows.");
  recorder.def("clear", &RoutingRecorder::clear, "Forgets all rows.");
}

}  // namespace

void bind_record(nb::module_& module) {
  nb::class_<RoutingRecord> rows(module, "RoutingRecord", "What was recorded.");
  rows.def_static(
      "open",
      [](const std::string& path) {
        const nb::gil_scoped_release released;
        return RoutingRecord::open(path);
      },
      nb::arg("path"), "A record of a file.");
  rows.def(
      "write",
      [](const RoutingRecord& self, const std::string& path) {
        const nb::gil_scoped_release released;
        self.write(path);
      },
      nb::arg("path"), "Writes a file.");
  rows.def_ro("model", &RoutingRecord::model);
  rows.def_ro("model_type", &RoutingRecord::model_type);
  rows.def(
      "layers",
      [](const RoutingRecord& self) {
        nb::list layers;
        for (const RecordedRows& rows_of_layer : self.layers) {
          layers.append(describe(rows_of_layer));
        }
        return nb::typed<nb::list, nb::dict>(std::move(layers));
      },
      "What is known of each layer.");
  rows.def("copy_rows", &copy_rows, nb::arg("layer"), nb::arg("tokens"), nb::arg("topk_ids"),
           nb::arg("topk_weights"), "Copies the rows of a layer to arrays.");
  bind_recorder(module);
  nb::class_<RoutingReplay> replay(module, "RoutingReplay", "Recorded rows by token.");
  replay.def(
      "__init__",
      [](RoutingReplay* self, const RoutingRecord& record) { new (self) RoutingReplay(record); },
      nb::arg("record"));
  replay.def("find", &find, nb::arg("layer"), nb::arg("tokens"), nb::arg("topk_ids").none(),
             nb::arg("topk_weights").none(), "Writes the rows of tokens.");
  replay.def(
      "has",
      [](const RoutingReplay& self, int64_t layer, int64_t sequence, int64_t position) {
        return self.has(layer, {.sequence = sequence, .position = position});
      },
      nb::arg("layer"), nb::arg("sequence"), nb::arg("position"), "Whether a token is there.");
  module.def(
      "recorded_layer",
      [](int64_t number, const nb::dict& spec) {
        const RecordedLayer layer = RecordedLayer::of(number, spec_from_dict(spec));
        return LayerFields(layer.layer, layer.num_ids, layer.num_slots, layer.spec_hash);
      },
      nb::arg("layer"), nb::arg("spec"), "Number, ids, slots and the spec's hash.");
  module.def(
      "merge_records",
      [](const std::vector<const RoutingRecord*>& records, std::string model,
         std::string model_type) {
        RoutingRecord merged{
            .model = std::move(model), .model_type = std::move(model_type), .layers = {}};
        for (const RoutingRecord* record : records) {
          merged.layers.insert(merged.layers.end(), record->layers.begin(), record->layers.end());
        }
        std::ranges::sort(merged.layers, {},
                          [](const RecordedRows& recorded) { return recorded.layer.layer; });
        return merged;
      },
      nb::arg("records"), nb::arg("model"), nb::arg("model_type"), "One record of all layers.");
  module.def("compare_routing", &compare, nb::arg("first"), nb::arg("second"),
             nb::arg("most_examples"), "Where two records differ.");
}

}  // namespace conclave::python
