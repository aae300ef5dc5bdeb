// The workspace of a layer whose caller brings none; the first such forward makes it.
#pragma once

#include "conclave/layer.h"

#include <cstddef>
#include <mutex>
#include <optional>
#include <span>

namespace conclave::inline v0 {

class OwnWorkspace {
 public:
  // Memory for one forward at a time, valid as long as the claim lives.
  struct Claim {
    std::unique_lock<std::mutex> lock;
    std::span<std::byte> memory;
  };
  // Throws Error(kState) while another claim lives, Error(kOutOfMemory, kDevice).
  Claim claim(const Context& context, size_t bytes, Stream stream = {});

 private:
  std::mutex mutex_;
  std::optional<Workspace> workspace_;
};

// Throws Error(kWorkspaceTooSmall).
void check_workspace_size(std::span<const std::byte> workspace, size_t bytes);

}  // namespace conclave::inline v0
