#include "device_record.h"

#include "arrays.h"
#include "context.h"
#include "names.h"

#include "conclave/device_routing_record.h"
#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

using LayerFields = std::tuple<int64_t, int64_t, int64_t, uint64_t>;

std::vector<RecordedLayer> layers_of(const std::vector<LayerFields>& fields) {
  std::vector<RecordedLayer> layers;
  for (const auto& [layer, num_ids, num_slots, spec_hash] : fields) {
    layers.push_back({layer, num_ids, num_slots, spec_hash});
  }
  return layers;
}

// Rings on the context's device, which they keep.
class PyDeviceRecorder {
 public:
  PyDeviceRecorder(std::shared_ptr<PyContext> context, const std::vector<LayerFields>& fields,
                   RecorderOptions options)
      : context_(std::move(context)),
        recorder_(context_->context(), layers_of(fields), std::move(options)) {}

  DeviceRoutingRecorder& recorder() { return recorder_; }

  void record(int64_t layer, nb::handle topk_ids, nb::handle topk_weights, nb::handle tokens,
              nb::handle num_tokens, uintptr_t stream) {
    const auto here = [&](const std::optional<Array>& array) {
      if (array) array->require_device(context_->device());
    };
    const std::optional<Array> ids(std::in_place, topk_ids, "topk_ids", stream);
    const std::optional<Array> weights(std::in_place, topk_weights, "topk_weights", stream);
    const std::optional<Array> keys = optional_array(tokens, "tokens", stream);
    const std::optional<Array> count = optional_array(num_tokens, "num_tokens", stream);
    for (const auto* array : {&ids, &weights, &keys, &count}) here(*array);
    DeviceRoutingRows rows{.topk_ids = ids->matrix("[T, top_k]"),
                           .topk_weights = weights->matrix("[T, top_k]")};
    if (keys) rows.tokens = keys->matrix("[T, 2]");
    if (count) rows.num_tokens = count_of(*count);
    const nb::gil_scoped_release released;
    recorder_.record(layer, rows, to_stream(reinterpret_cast<CUstream_st*>(stream)));
  }

 private:
  static const int64_t* count_of(const Array& array) {
    const ConstTensorView view = array.vector("[1]");
    if (view.dtype == DType::kI64 && view.shape[0] == 1) {
      return static_cast<const int64_t*>(view.data);
    }
    throw Error(ErrorCode::kDType,
                {.what = "an argument has the wrong type",
                 .tensor = "num_tokens",
                 .expected = "int64 [1]",
                 .found = std::string(dtype_to_python(view.dtype)) + " " + view.shape.to_string()});
  }

  std::shared_ptr<PyContext> context_;
  DeviceRoutingRecorder recorder_;
};

}  // namespace

void bind_device_record(nb::module_& module) {
  nb::class_<PyDeviceRecorder> recorder(module, "DeviceRoutingRecorder",
                                        "Rings of recorded routing on a GPU.");
  recorder.def(
      "__init__",
      [](PyDeviceRecorder* self, std::shared_ptr<PyContext> context,
         const std::vector<LayerFields>& layers, int64_t capacity, const std::string& when_full,
         std::string model, std::string model_type) {
        new (self) PyDeviceRecorder(std::move(context), layers,
                                    {.capacity = capacity,
                                     .when_full = parse_word<WhenFull>("when_full", when_full),
                                     .model = std::move(model),
                                     .model_type = std::move(model_type)});
      },
      nb::arg("context"), nb::arg("layers"), nb::arg("capacity"), nb::arg("when_full"),
      nb::arg("model"), nb::arg("model_type"));
  recorder.def("record", &PyDeviceRecorder::record, nb::arg("layer"), nb::arg("topk_ids"),
               nb::arg("topk_weights"), nb::arg("tokens").none(), nb::arg("num_tokens").none(),
               nb::arg("stream"), "Adds rows of a layer when the stream reaches them.");
  const auto waits = nb::call_guard<nb::gil_scoped_release>();
  recorder.def(
      "recorded_tokens",
      [](PyDeviceRecorder& self, int64_t layer) { return self.recorder().recorded_tokens(layer); },
      nb::arg("layer"), waits, "Tokens that a layer was given. Waits for the GPU.");
  recorder.def(
      "dropped_tokens",
      [](PyDeviceRecorder& self, int64_t layer) { return self.recorder().dropped_tokens(layer); },
      nb::arg("layer"), waits, "Those of them that are gone. Waits for the GPU.");
  recorder.def(
      "snapshot", [](PyDeviceRecorder& self) { return self.recorder().snapshot(); }, waits,
      "A copy of all rows. Waits for the GPU.");
  recorder.def(
      "clear", [](PyDeviceRecorder& self) { self.recorder().clear(); }, waits,
      "Forgets all rows. Waits for the GPU.");
}

}  // namespace conclave::python
