#include "errors.h"

#include "wording.h"

#include <exception>
#include <string>

namespace conclave::python {
namespace {

// Requires the GIL. Leaves a Python exception set, even if this itself fails.
void set_python_error(const Error& error) {
  try {
    const ErrorDetail& detail = error.detail();
    const nb::object exception =
        nb::module_::import_("conclave.errors")
            .attr("from_code")(static_cast<int32_t>(error.code()),
                               std::string(to_string(error.code())).c_str(),
                               in_python_words(error.what()), detail.file, detail.tensor,
                               in_python_words(detail.expected), in_python_words(detail.found),
                               in_python_words(detail.limit), in_python_words(detail.hint));
    if (const auto* const lost = dynamic_cast<const CommError*>(&error)) {
      exception.attr("peer") = lost->peer();
      exception.attr("phase") = lost->phase();
    }
    PyErr_SetObject(exception.type().ptr(), exception.ptr());
  } catch (nb::python_error& failure) {
    failure.restore();
  }
}

}  // namespace

void register_error_translator() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_python_error(error);
    }
  });
}

}  // namespace conclave::python
