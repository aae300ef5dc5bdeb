#include "conclave/migration.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/placement.h"
#include "capi/structs.h"

#include <memory>
#include <utility>

namespace conclave::inline v0::capi {
namespace {

// A move reads and sends over these as long as it goes on.
struct MoveResources {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<const WeightSource> source;
  MigrationOptions options;
};

MoveResources resources_of(const conclave_migration_options* options) {
  const conclave_migration_options given = take_optional(options, "options");
  MoveResources resources;
  if (given.communicator != nullptr) {
    resources.communicator = required(given.communicator, "options.communicator").communicator;
    resources.options.communicator = resources.communicator.get();
  }
  if (given.source != nullptr) {
    resources.source = required(given.source, "options.source").source;
    resources.options.source = resources.source.get();
  }
  if (given.processor_share != 0) resources.options.processor_share = given.processor_share;
  if (given.piece_bytes != 0) resources.options.piece_bytes = given.piece_bytes;
  return resources;
}

}  // namespace
}  // namespace conclave::inline v0::capi

// Members are ended from the last to the first: the migration before what it uses.
struct conclave_migration {
  std::shared_ptr<conclave::capi::ContextState> context;
  conclave::capi::MoveResources resources;
  conclave::Migration migration;

  conclave_migration(conclave_layer& layer, const conclave::ExpertSlots& slots,
                     conclave::capi::MoveResources used)
      : context(layer.context),
        resources(std::move(used)),
        migration(layer.layer, slots, resources.options) {}
};

namespace capi = conclave::capi;

conclave_status conclave_layer_update_placement(
    conclave_layer* layer, const conclave_slots* slots,
    const conclave_migration_options* options) noexcept {
  return capi::guarded([&] {
    conclave::MoeLayer& of = capi::required(layer, "layer").layer;
    const conclave::ExpertSlots& next = capi::required(slots, "slots").slots;
    of.update_placement(next, capi::resources_of(options).options);
  });
}

conclave_status conclave_migration_create(conclave_layer* layer, const conclave_slots* slots,
                                          const conclave_migration_options* options,
                                          conclave_migration** out) noexcept {
  return capi::guarded([&] {
    conclave_layer& of = capi::required(layer, "layer");
    const conclave::ExpertSlots& next = capi::required(slots, "slots").slots;
    capi::required(out, "out");
    *out = new conclave_migration(of, next, capi::resources_of(options));
  });
}

void conclave_migration_destroy(conclave_migration* migration) noexcept { delete migration; }

conclave_status conclave_migration_get_status(const conclave_migration* migration,
                                              conclave_migration_status* status) noexcept {
  return capi::guarded([&] {
    const conclave::MigrationStatus now = capi::required(migration, "migration").migration.status();
    capi::fill(capi::fillable(status, "status"), {.struct_size = 0,
                                                  .is_done = now.is_done ? 1 : 0,
                                                  .has_failed = now.has_failed ? 1 : 0,
                                                  .rounds = now.rounds,
                                                  .rounds_done = now.rounds_done,
                                                  .experts_moved = now.experts_moved});
  });
}

conclave_status conclave_migration_check(const conclave_migration* migration) noexcept {
  return capi::guarded([&] { capi::required(migration, "migration").migration.check(); });
}

conclave_status conclave_migration_finish(conclave_migration* migration) noexcept {
  return capi::guarded([&] { capi::required(migration, "migration").migration.finish(); });
}
