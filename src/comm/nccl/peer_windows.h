// Memory of each rank that the others address: symmetric memory of NCCL, by a communicator of its
// own, so that no abort of other work takes it from a kernel.
#pragma once

#include "comm/nccl/nccl_group.h"
#include "comm/nccl/nccl_library.h"
#include "comm/nccl/window_layout.h"

#include "conclave/comm.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace conclave::inline v0::comm {

class PeerWindows {
 public:
  struct Search;
  struct Request {
    const NcclLibrary& library;
    Communicator& host;  // connects the same ranks
    int32_t ordinal = 0;
    // Makes a further group of the same ranks, in the time that it is given.
    std::function<std::unique_ptr<NcclGroup>(std::chrono::nanoseconds)> make;
    std::chrono::nanoseconds timeout{};
  };
  // Collective, with the device current. All ranks have windows or none has, with a reason then.
  // Throws CommError where a rank does not come.
  static Search open(const Request& request);

  PeerWindows(const PeerWindows&) = delete;
  PeerWindows& operator=(const PeerWindows&) = delete;
  // Gives the memory back: no kernel of this rank uses it any more. Those of peers may, since their
  // own mapping keeps it.
  ~PeerWindows();
  // A kernel may still run: the windows stay mapped for as long as the process lives.
  void keep_mapped() noexcept { is_kept_ = true; }

  WindowBlocks blocks() const noexcept { return {.of_ranks = blocks_, .slot_bytes = slot_bytes_}; }

 private:
  PeerWindows(const NcclLibrary& library, int32_t ordinal) : library_(library), ordinal_(ordinal) {}
  // Steps that each rank takes for itself. They return why not, or throw Error.
  std::string allocate(int32_t ranks);
  std::string register_memory(std::chrono::nanoseconds timeout);
  std::string find_blocks(int32_t rank, int32_t ranks);
  std::string write_card(int32_t rank) const;
  std::string read_cards() const;
  std::string clear() const;

  NcclLibrary library_;
  int32_t ordinal_;
  std::unique_ptr<NcclGroup> group_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  int64_t slot_bytes_ = 0;
  ncclWindow_vidmem* window_ = nullptr;
  std::vector<std::byte*> blocks_;
  bool is_kept_ = false;
};

struct PeerWindows::Search {
  std::unique_ptr<PeerWindows> windows;
  std::string reason;  // where there are none
};

}  // namespace conclave::inline v0::comm
