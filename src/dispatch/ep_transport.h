// Brings rows, with their ids and weights, from home ranks to owning ranks. Two ways: exactly the
// rows after an exchange of their number, or one exchange of fixed size.
#pragma once

#include "core/workspace_layout.h"
#include "dispatch/ep_plan.h"
#include "dispatch/ep_tables.h"

#include <cstddef>
#include <memory>
#include <span>

namespace conclave::inline v0::dispatch {

struct BundleRows {
  const std::byte* rows = nullptr;
  int64_t num_rows = 0;
};

class RowTransport {
 public:
  virtual ~RowTransport() = default;

  // Points the send blocks at memory for send_rows[rank] rows each.
  virtual void open(const EpTables& tables, std::span<std::byte> workspace) const = 0;
  // Collective. Sends the blocks off. Throws CommError.
  virtual void begin(const EpTables& tables, std::span<std::byte> workspace) const = 0;
  // Whether await would wait for nobody. Throws CommError.
  virtual bool has_come(std::span<std::byte> workspace) const = 0;
  // Fills the received blocks; their rows are in the bundle returned. Only the number of rows is
  // checked; the contents are as the peers sent them. Throws CommError.
  virtual BundleRows await(const EpTables& tables, std::span<std::byte> workspace) const = 0;
};

std::unique_ptr<RowTransport> make_variable_transport(const EpPlan& plan, WorkspaceLayout& layout);
std::unique_ptr<RowTransport> make_fixed_slot_transport(const EpPlan& plan,
                                                        WorkspaceLayout& layout);

}  // namespace conclave::inline v0::dispatch
