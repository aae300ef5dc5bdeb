// An all-to-all of rows: converts counts and offsets in rows to bytes.
#pragma once

#include "core/workspace_layout.h"

#include "conclave/comm.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace conclave::inline v0::dispatch {

// Arrays of [ranks] each, in rows.
struct RowCounts {
  const int64_t* send_rows = nullptr;
  const int64_t* send_base = nullptr;
  const int64_t* recv_rows = nullptr;
  const int64_t* recv_base = nullptr;
};

// Says whether bytes also move between begin and wait, where the communicator can do that.
enum class MovesBytes : uint8_t { kInCalls, kInBackground };

// One exchange may be under way at a time; its arrays live in the workspace.
class Exchange {
 public:
  Exchange(int32_t ranks, MovesBytes moves, WorkspaceLayout& layout)
      : ranks_(ranks), moves_(moves), arrays_(layout.book<int64_t>(int64_t{4} * ranks)) {}

  CommHandle begin(Communicator& communicator, const RowCounts& counts, int64_t row_bytes,
                   const void* send, void* recv, std::span<std::byte> workspace) const;

 private:
  int32_t ranks_;
  MovesBytes moves_;
  WorkspaceSlice arrays_;
};

}  // namespace conclave::inline v0::dispatch
