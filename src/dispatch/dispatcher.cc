#include "dispatch/dispatcher.h"

namespace conclave::inline v0::dispatch {

ExpertBatch Dispatcher::dispatch(const Routing& routing, const RowBundle& rows,
                                 std::span<std::byte> workspace, Executor& executor) const {
  begin_dispatch({.routing = routing, .rows = rows}, workspace, executor);
  return await_dispatch(workspace);
}

void Dispatcher::combine(const CombineArgs& args, std::span<std::byte> workspace,
                         Executor& executor) const {
  begin_combine(args, workspace, executor);
  await_combine(args, workspace, executor);
}

}  // namespace conclave::inline v0::dispatch
