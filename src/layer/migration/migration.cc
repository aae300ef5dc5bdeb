#include "conclave/migration.h"

#include "layer/migration/migration_worker.h"
#include "layer/moe_layer_impl.h"

#include <utility>

namespace conclave::inline v0 {

struct Migration::Impl {
  MigrationWorker worker;
};

Migration::Migration(MoeLayer& layer, const ExpertSlots& slots, const MigrationOptions& options)
    : impl_(new Impl{MigrationWorker(layer.impl_->layer.lend(), slots, options)}) {}

Migration::~Migration() = default;

MigrationStatus Migration::status() const { return impl_->worker.status(); }

void Migration::check() const { impl_->worker.check(); }

void Migration::finish() { impl_->worker.finish(); }

}  // namespace conclave::inline v0
