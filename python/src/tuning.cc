#include "tuning.h"

#include "context.h"
#include "fields.h"

#include "conclave/error.h"

#include <utility>
#include <vector>

namespace conclave::python {
namespace {

nb::typed<nb::list, nb::dict> list_of(const std::vector<TuningEntry>& entries) {
  nb::list rows;
  for (const TuningEntry& entry : entries) rows.append(tuning_entry_to_dict(entry));
  return nb::typed<nb::list, nb::dict>(std::move(rows));
}

TuningTable table_of(const std::vector<nb::dict>& entries) {
  TuningTable table;
  for (const nb::dict& entry : entries) table.set(tuning_entry_from_dict(entry));
  // An entry whose line cannot be read again lacks a field: no layer would ever find it.
  static_cast<void>(TuningTable::parse(table.to_text(), "entries"));
  return table;
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
      .def(
          "__init__",
          [](TuningTable* self, const std::vector<nb::dict>& entries) {
            new (self) TuningTable(table_of(entries));
          },
          nb::arg("entries"),
          "A table from dictionaries, as `entries` and `tuning_candidates` give them; of two for "
          "the same problem and tokens the later counts. `microseconds` and `tile` may be left "
          "out. Raises Error naming the field or the entry.")
      .def_static(
          "parse", [](const std::string& text) { return TuningTable::parse(text); },
          nb::arg("text"), "A table from its text. Raises Error naming the line.")
      .def_static(
          "load", [](nb::object path) { return TuningTable::load(path_text(path)); },
          nb::arg("path"), "A table from a file. Raises Error naming file and line.")
      .def("to_text", &TuningTable::to_text, "The text that parse reads.")
      .def_prop_ro(
          "entries", [](const TuningTable& self) { return list_of(self.entries()); },
          "A dictionary for each choice: what it was measured for, kernel, tile, time.")
      .def("__len__", [](const TuningTable& table) { return table.entries().size(); })
      .def("__repr__", [](const TuningTable& table) {
        return "<conclave.TuningTable, " + std::to_string(table.entries().size()) + " entries>";
      });
  module.def(
      "tuning_candidates",
      [](const PyContext& context, const nb::dict& spec, const nb::dict& options,
         const nb::dict& parallel, int64_t tokens) {
        return list_of(tuning_candidates(context.context(), spec_from_dict(spec),
                                         options_from_dict(options), parallel_from_dict(parallel),
                                         tokens));
      },
      nb::arg("context"), nb::arg("spec"), nb::arg("options"), nb::arg("parallel"),
      nb::arg("tokens"), "Every choice that a layer could make for calls of so many tokens.");
}

}  // namespace conclave::python
