#include "conclave/shared_weights.h"

#include "array_source.h"
#include "fields.h"
#include "load_scope.h"
#include "names.h"
#include "refit.h"

#include "conclave/error.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

// The layout of a trainer's arrays, the same for every version.
struct SharedArrays {
  MoeSpec spec;
  ArrayLayout layout;

  ArraySource source(const nb::dict& weights) const { return {weights, spec, layout}; }
};

std::vector<SharedTensor> tensors_of(const ArraySource& source) {
  std::vector<SharedTensor> tensors;
  for (const WeightId id : weights::kAll) {
    const WeightInfo info = source.describe(id);
    if (info.count == 0) continue;
    SharedTensor tensor{.id = id, .info = info};
    for (int32_t expert = 0; expert < info.count; ++expert) {
      if (source.has(id, expert)) tensor.experts.push_back(expert);
    }
    if (std::ssize(tensor.experts) == info.count) tensor.experts.clear();
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

bool same(const SharedTensor& a, const SharedTensor& b) {
  return a.id == b.id && a.experts == b.experts && a.info.count == b.info.count &&
         a.info.rows == b.info.rows && a.info.cols == b.info.cols && a.info.dtype == b.info.dtype;
}

class PySharedWriter {
 public:
  PySharedWriter(const std::string& path, const nb::dict& spec, const nb::dict& weights,
                 const std::string& order, const std::string& shared_order, bool transposed,
                 std::vector<int32_t> local_of, uint64_t layer)
      : arrays_{.spec = spec_from_dict(spec),
                .layout = {.order = parse_word<GateUpOrder>("gate_up_order", order),
                           .shared_order =
                               parse_word<GateUpOrder>("shared_gate_up_order", shared_order),
                           .transposed = transposed,
                           .local_of = std::move(local_of)}},
        tensors_(tensors_of(on_host(arrays_.source(weights)))),
        writer_(path, tensors_, layer) {}

  // Nothing is marked as incomplete before all arrays have their place.
  uint64_t publish(const nb::dict& weights, uint64_t version) {
    const ArraySource source = arrays_.source(weights);
    on_host(source);
    check_same(tensors_of(source));
    run_interruptible([&] {
      writer_.begin();
      for (const SharedTensor& tensor : tensors_) write(source, tensor);
      writer_.publish(version);
    });
    return writer_.version();
  }
  uint64_t version() const { return writer_.version(); }

 private:
  static const ArraySource& on_host(const ArraySource& source) {
    if (source.memory() == MemoryKind::kHost) return source;
    throw Error(ErrorCode::kDevice, {.what = "shared weights are written from host memory",
                                     .tensor = "weights",
                                     .found = to_string(source.device()),
                                     .hint = "pass tensor.cpu()"});
  }

  void check_same(const std::vector<SharedTensor>& given) const {
    for (size_t i = 0; i < std::max(given.size(), tensors_.size()); ++i) {
      if (i < given.size() && i < tensors_.size() && same(given[i], tensors_[i])) continue;
      const SharedTensor& other = i < given.size() ? given[i] : tensors_[i];
      throw Error(ErrorCode::kInvalidArgument,
                  {.what = "every version of shared weights has the same arrays",
                   .tensor = to_string(other.id),
                   .hint = "make another writer for other names, shapes, types or experts"});
    }
  }

  void write(const ArraySource& source, const SharedTensor& tensor) {
    const auto write_one = [&](int64_t expert) {
      source.read(tensor.id, expert, {0, tensor.info.rows, 0, tensor.info.cols},
                  writer_.memory(tensor.id, expert));
    };
    for (const int32_t expert : tensor.experts) write_one(expert);
    if (!tensor.experts.empty()) return;
    for (int64_t expert = 0; expert < tensor.info.count; ++expert) write_one(expert);
  }

  SharedArrays arrays_;
  std::vector<SharedTensor> tensors_;
  SharedWeightsWriter writer_;
};

}  // namespace

void bind_shared_weights(nb::module_& module) {
  nb::class_<PySharedWriter>(module, "SharedWeightsWriter",
                             "Weights for other processes. Use conclave.SharedWeightsWriter.")
      .def(nb::init<const std::string&, const nb::dict&, const nb::dict&, const std::string&,
                    const std::string&, bool, std::vector<int32_t>, uint64_t>(),
           nb::arg("path"), nb::arg("spec"), nb::arg("weights"), nb::arg("gate_up_order"),
           nb::arg("shared_gate_up_order"), nb::arg("transposed"), nb::arg("local_of"),
           nb::arg("layer"))
      .def("publish", &PySharedWriter::publish, nb::arg("weights"), nb::arg("version"))
      .def_prop_ro("version", &PySharedWriter::version);
  nb::class_<SharedWeights>(module, "SharedWeights",
                            "Weights of another process. Use conclave.SharedWeights.")
      .def(
          "__init__",
          [](SharedWeights* self, const std::string& path, bool verify) {
            run_interruptible([&] {
              new (self)
                  SharedWeights(path, verify ? SharedChecksum::kVerify : SharedChecksum::kSkip);
            });
          },
          nb::arg("path"), nb::arg("verify"))
      .def_prop_ro("version", &SharedWeights::version)
      .def_prop_ro("layer", &SharedWeights::layer)
      .def("check_unchanged", &SharedWeights::check_unchanged)
      .def("tensors", [](const SharedWeights& self) {
        std::vector<std::pair<std::string, std::vector<int32_t>>> tensors;
        for (const SharedTensor& tensor : self.tensors()) {
          tensors.emplace_back(to_string(tensor.id), tensor.experts);
        }
        return tensors;
      });
}

}  // namespace conclave::python
