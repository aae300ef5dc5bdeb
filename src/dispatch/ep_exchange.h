// An all-to-all of rows: converts counts and offsets in rows to bytes.
#pragma once

#include "core/workspace_layout.h"

#include "conclave/comm.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace conclave::inline v0::dispatch {

// Arrays of [ranks] each, in rows.
struct RowCounts {
  const int64_t* send_rows = nullptr;
  const int64_t* send_base = nullptr;
  const int64_t* recv_rows = nullptr;
  const int64_t* recv_base = nullptr;
};

// One exchange may be under way at a time; its arrays live in the workspace.
class Exchange {
 public:
  Exchange(int32_t ranks, WorkspaceLayout& layout)
      : ranks_(ranks), arrays_(layout.book<int64_t>(int64_t{4} * ranks)) {}

  CommHandle begin(Communicator& communicator, const RowCounts& counts, int64_t row_bytes,
                   const void* send, void* recv, std::span<std::byte> workspace) const;

 private:
  int32_t ranks_;
  WorkspaceSlice arrays_;
};

}  // namespace conclave::inline v0::dispatch
