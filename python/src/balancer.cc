#include "conclave/balancer.h"

#include "balancer.h"
#include "layer.h"

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

// Gives lines to a function of Python.
class PythonLog final : public LogSink {
 public:
  explicit PythonLog(nb::object write) : write_(std::move(write)) {}
  void log(LogLevel, std::string_view message) override {
    const nb::gil_scoped_acquire acquired;
    write_(std::string(message));
  }

 private:
  nb::object write_;
};

// A balancer with what it needs. Layers count on their own, so that it takes what is new.
class PyBalancer {
 public:
  PyBalancer(const std::vector<PyLayer*>& layers, std::shared_ptr<Communicator> communicator,
             BalancerOptions options, nb::object write)
      : communicator_(std::move(communicator)),
        log_(std::move(write)),
        context_({.num_threads = 1, .log = &log_}) {
    options.communicator = communicator_.get();
    std::vector<MoeLayer*> moved;
    for (PyLayer* layer : layers) moved.push_back(&layer->first_layer());
    balancer_ = std::make_unique<Balancer>(context_, std::move(moved), options);
  }
  ~PyBalancer() {
    const nb::gil_scoped_release released;
    balancer_.reset();
  }
  PyBalancer(const PyBalancer&) = delete;
  PyBalancer& operator=(const PyBalancer&) = delete;

  void step(const std::vector<std::vector<int64_t>>& rows) {
    const nb::gil_scoped_release released;
    for (size_t layer = 0; layer < rows.size(); ++layer) {
      const std::span<int64_t> load = balancer_->load(layer);
      for (size_t expert = 0; expert < load.size() && expert < rows[layer].size(); ++expert) {
        load[expert] += rows[layer][expert];
      }
    }
    balancer_->step();
  }
  Balancer& get() const { return *balancer_; }

 private:
  std::shared_ptr<Communicator> communicator_;
  PythonLog log_;
  Context context_;
  std::unique_ptr<Balancer> balancer_;
};

}  // namespace

void bind_balancer(nb::module_& module) {
  nb::class_<PyBalancer>(module, "Balancer", "Use conclave.Balancer.")
      .def(
          "__init__",
          [](PyBalancer* self, const std::vector<PyLayer*>& layers,
             std::shared_ptr<Communicator> communicator, const std::string& rule, int32_t num_nodes,
             double least_gain, int64_t window_size, int64_t step_interval, bool log_balancedness,
             int64_t log_balancedness_interval, bool use_async, double processor_share,
             size_t piece_bytes, nb::object write) {
            const BalancerOptions options{.rule = rule,
                                          .num_nodes = num_nodes,
                                          .least_gain = least_gain,
                                          .window_size = window_size,
                                          .step_interval = step_interval,
                                          .log_balancedness = log_balancedness,
                                          .log_balancedness_interval = log_balancedness_interval,
                                          .use_async = use_async,
                                          .processor_share = processor_share,
                                          .piece_bytes = piece_bytes};
            new (self) PyBalancer(layers, std::move(communicator), options, std::move(write));
          },
          nb::arg("layers"), nb::arg("communicator"), nb::arg("rule"), nb::arg("num_nodes"),
          nb::arg("least_gain"), nb::arg("window_size"), nb::arg("step_interval"),
          nb::arg("log_balancedness"), nb::arg("log_balancedness_interval"), nb::arg("use_async"),
          nb::arg("processor_share"), nb::arg("piece_bytes"), nb::arg("write"))
      .def("step", &PyBalancer::step, nb::arg("rows"), "Rows of each layer's experts in the step.")
      .def("rebalance", [](const PyBalancer& self) { self.get().rebalance(); })
      .def("status", [](const PyBalancer& self) {
        const BalancerStatus status = self.get().status();
        return std::tuple(status.steps, status.rebalances, status.experts_moved, status.is_moving,
                          status.balancedness);
      });
}

}  // namespace conclave::python
