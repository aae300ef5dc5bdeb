#include "tuning.h"

#include "conclave/error.h"

#include <string_view>

namespace conclave::python {
namespace {

nb::dict entry_to_dict(const TuningEntry& entry) {
  nb::dict dict;
  dict["device"] = entry.key.device;
  dict["format"] = entry.key.format;
  dict["num_experts"] = entry.key.num_experts;
  dict["hidden_size"] = entry.key.hidden_size;
  dict["intermediate_size"] = entry.key.intermediate_size;
  dict["top_k"] = entry.key.top_k;
  dict["tokens"] = entry.tokens;
  dict["kernel"] = entry.kernel;
  dict["tile"] = entry.tile;
  dict["microseconds"] = entry.microseconds;
  return dict;
}

nb::list entries_of(const TuningTable& table) {
  nb::list rows;
  for (const TuningEntry& entry : table.entries()) rows.append(entry_to_dict(entry));
  return rows;
}

std::string path_text(nb::handle path) {
  const nb::object text = nb::module_::import_("os").attr("fspath")(path);
  return nb::cast<std::string>(text);
}

}  // namespace

std::shared_ptr<const TuningTable> tuning_from_python(const std::string& field, nb::handle object) {
  if (object.is_none()) return nullptr;
  if (nb::isinstance<TuningTable>(object)) {
    return std::make_shared<const TuningTable>(nb::cast<const TuningTable&>(object));
  }
  if (nb::isinstance<nb::str>(object) || nb::hasattr(object, "__fspath__")) {
    return std::make_shared<const TuningTable>(TuningTable::load(path_text(object)));
  }
  throw Error(ErrorCode::kDType, {.what = "a field has the wrong type",
                                  .tensor = field,
                                  .expected = "a TuningTable, or the path of one",
                                  .found = nb::cast<std::string>(nb::repr(object))});
}

void bind_tuning(nb::module_& module) {
  nb::class_<TuningTable>(module, "TuningTable",
                          "Measured choices of kernels, as `conclave bench --tune` writes them. "
                          "Give one to a layer as LayerOptions.tuning.")
      .def_static(
          "parse", [](const std::string& text) { return TuningTable::parse(text); },
          nb::arg("text"), "A table from its text. Raises Error naming the line.")
      .def_static(
          "load", [](nb::object path) { return TuningTable::load(path_text(path)); },
          nb::arg("path"), "A table from a file. Raises Error naming file and line.")
      .def("to_text", &TuningTable::to_text, "The text that parse reads.")
      .def_prop_ro("entries", &entries_of,
                   "A dictionary for each choice: what it was measured for, kernel, tile, time.")
      .def("__len__", [](const TuningTable& table) { return table.entries().size(); })
      .def("__repr__", [](const TuningTable& table) {
        return "<conclave.TuningTable, " + std::to_string(table.entries().size()) + " entries>";
      });
}

}  // namespace conclave::python
