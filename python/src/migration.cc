#include "conclave/migration.h"

#include "fields.h"
#include "layer.h"
#include "migration.h"

#include "conclave/balance.h"
#include "conclave/checkpoint.h"

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::python {
namespace {

// The slots as lists, in the order of the constructor's fields.
struct SlotLists {
  int64_t num_experts;
  std::vector<int32_t> logical_of;
  std::vector<int32_t> first_of;

  ExpertSlots slots() const {
    return {.num_experts = num_experts, .logical_of = logical_of, .first_of = first_of};
  }
};

// Experts under way, with everything that they need.
class PyMigration {
 public:
  PyMigration(PyLayer& layer, const ExpertSlots& slots, std::shared_ptr<Communicator> communicator,
              std::unique_ptr<WeightSource> source, double processor_share, size_t piece_bytes)
      : communicator_(std::move(communicator)), source_(std::move(source)) {
    const MigrationOptions options{.communicator = communicator_.get(),
                                   .source = source_.get(),
                                   .processor_share = processor_share,
                                   .piece_bytes = piece_bytes};
    migration_ = layer.begin_migration(slots, options);
  }
  ~PyMigration() {
    const nb::gil_scoped_release released;
    migration_.reset();
  }
  PyMigration(const PyMigration&) = delete;
  PyMigration& operator=(const PyMigration&) = delete;

  Migration& get() const { return *migration_; }

 private:
  std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<WeightSource> source_;
  std::unique_ptr<Migration> migration_;
};

std::unique_ptr<WeightSource> source_of(const Checkpoint* checkpoint, const CheckpointFeed* feed,
                                        int64_t index) {
  if (checkpoint != nullptr) return checkpoint->layer_source(index);
  if (feed != nullptr) return feed->layer_source(index);
  return nullptr;
}

void bind_class(nb::module_& module) {
  nb::class_<PyMigration>(module, "Migration", "Experts on their way. Use conclave.Migration.")
      .def(
          "__init__",
          [](PyMigration* self, PyLayer& layer, int64_t num_experts,
             std::vector<int32_t> logical_of, std::vector<int32_t> first_of,
             std::shared_ptr<Communicator> communicator, const Checkpoint* checkpoint,
             const CheckpointFeed* feed, int64_t index, double processor_share,
             size_t piece_bytes) {
            const SlotLists lists{num_experts, std::move(logical_of), std::move(first_of)};
            new (self)
                PyMigration(layer, lists.slots(), std::move(communicator),
                            source_of(checkpoint, feed, index), processor_share, piece_bytes);
          },
          nb::arg("layer"), nb::arg("num_experts"), nb::arg("logical_of"), nb::arg("first_of"),
          nb::arg("communicator"), nb::arg("checkpoint").none(), nb::arg("feed").none(),
          nb::arg("index"), nb::arg("processor_share"), nb::arg("piece_bytes"),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>())
      .def("status",
           [](const PyMigration& self) {
             const MigrationStatus status = self.get().status();
             return std::tuple(status.is_done, status.has_failed, status.rounds, status.rounds_done,
                               status.experts_moved);
           })
      .def("check", [](const PyMigration& self) { self.get().check(); })
      .def(
          "finish", [](PyMigration& self) { self.get().finish(); },
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_migration(nb::module_& module, nb::class_<PyLayer>& layer) {
  layer.def(
      "update_placement",
      [](PyLayer& self, int64_t num_experts, std::vector<int32_t> logical_of,
         std::vector<int32_t> first_of, Communicator* communicator, const Checkpoint* checkpoint,
         const CheckpointFeed* feed, int64_t index, size_t piece_bytes) {
        const SlotLists lists{num_experts, std::move(logical_of), std::move(first_of)};
        const std::unique_ptr<WeightSource> source = source_of(checkpoint, feed, index);
        self.update_placement(
            lists.slots(),
            {.communicator = communicator, .source = source.get(), .piece_bytes = piece_bytes});
      },
      nb::arg("num_experts"), nb::arg("logical_of"), nb::arg("first_of"),
      nb::arg("communicator").none(), nb::arg("checkpoint").none(), nb::arg("feed").none(),
      nb::arg("index"), nb::arg("piece_bytes"), "Moves experts to other slots, between forwards.");
  layer.def(
      "slots",
      [](const PyLayer& self) {
        ExpertSlots slots = self.layer().slots();
        return std::tuple(slots.num_experts, std::move(slots.logical_of),
                          std::move(slots.first_of));
      },
      "The experts of each rank now.");
  layer.def_prop_ro("placement_epoch",
                    [](const PyLayer& self) { return self.layer().placement_epoch(); });
  module.def(
      "slots_of",
      [](int64_t num_experts, const nb::dict& parallel) {
        ExpertSlots slots = slots_of(num_experts, parallel_from_dict(parallel));
        return std::tuple(slots.num_experts, std::move(slots.logical_of),
                          std::move(slots.first_of));
      },
      nb::arg("num_experts"), nb::arg("parallel"), "The slots of a split.");
  bind_class(module);
}

}  // namespace conclave::python
