#include "tool.h"

#include "run_tool.h"

#include <csignal>
#include <string>
#include <vector>

namespace conclave::python {
namespace {

// Ctrl-C ends the tool as it does without Python, whose handler would only record it.
class DefaultInterrupt {
 public:
  DefaultInterrupt() : saved_(std::signal(SIGINT, SIG_DFL)) {}
  ~DefaultInterrupt() { std::signal(SIGINT, saved_); }
  DefaultInterrupt(const DefaultInterrupt&) = delete;
  DefaultInterrupt& operator=(const DefaultInterrupt&) = delete;

 private:
  void (*saved_)(int);
};

int run(const std::vector<std::string>& arguments) {
  std::vector<const char*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
  const nb::gil_scoped_release released;
  const DefaultInterrupt interrupt;
  return tool::run_tool(static_cast<int>(pointers.size()), pointers.data());
}

}  // namespace

void bind_tool(nb::module_& module) {
  module.def("run_tool", &run, nb::arg("arguments"),
             "Runs the command-line tool; the first argument is its name. Returns its status.");
}

}  // namespace conclave::python
