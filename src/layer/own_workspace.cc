#include "layer/own_workspace.h"

#include "conclave/error.h"

#include <string>
#include <utility>

namespace conclave::inline v0 {

OwnWorkspace::Claim OwnWorkspace::claim(const Context& context, size_t bytes, Stream stream) {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    throw Error(ErrorCode::kState, {.what = "another forward is using this layer's own workspace",
                                    .hint = "give each concurrent forward a Workspace"});
  }
  if (!workspace_) workspace_.emplace(context, bytes, stream);
  return {.lock = std::move(lock), .memory = workspace_->memory()};
}

void check_workspace_size(std::span<const std::byte> workspace, size_t bytes) {
  if (workspace.size() >= bytes) return;
  throw Error(ErrorCode::kWorkspaceTooSmall, {.what = "the workspace is too small for this layer",
                                              .tensor = "workspace",
                                              .expected = std::to_string(bytes) + " bytes",
                                              .found = std::to_string(workspace.size())});
}

}  // namespace conclave::inline v0
