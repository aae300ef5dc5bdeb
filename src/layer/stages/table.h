// Stages as data: what each of them reads and writes. The workspace is booked from such a list, and
// `explain` prints it.
#pragma once

#include "core/dcheck.h"
#include "core/workspace_layout.h"

#include "conclave/layer.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::inline v0 {

// Buffers of a device's list, by their numbers.
class BufferSet {
 public:
  constexpr BufferSet() = default;
  template <class Buffer>
  constexpr BufferSet(Buffer buffer)  // NOLINT: a set of one
      : bits_(uint64_t{1} << static_cast<unsigned>(buffer)) {}

  constexpr BufferSet operator|(const BufferSet& other) const {
    BufferSet both = other;
    both.bits_ |= bits_;
    return both;
  }
  constexpr bool has(size_t buffer) const { return (bits_ >> buffer & 1) != 0; }
  static constexpr BufferSet all() {
    BufferSet every;
    every.bits_ = ~uint64_t{0};
    return every;
  }

 private:
  uint64_t bits_ = 0;
};

// `set` on a condition, otherwise nothing.
constexpr BufferSet when(bool condition, BufferSet set) { return condition ? set : BufferSet(); }

struct Stage {
  std::string name;
  BufferSet reads = {};
  BufferSet writes = {};
  bool listed = true;  // in Plan::stages; a mere conversion or exchange is not
  int64_t most_tokens = std::numeric_limits<int64_t>::max();  // it serves no larger call
};

// A device's stages by number, in the order of a chunk. The workspace is booked from this list,
// `explain` prints it, and a chunk runs what it declares: a stage gets the buffers that it reads
// and writes and no others.
template <class Number, size_t kCount>
struct StageList {
  std::array<Stage, kCount> list;  // a stage without a name does not run

  void set(Number number, Stage stage) { list[static_cast<size_t>(number)] = std::move(stage); }
  const Stage& of(Number number) const { return list[static_cast<size_t>(number)]; }
  bool has(Number number) const { return !of(number).name.empty(); }
  BufferSet buffers_of(Number number) const {
    CONCLAVE_DCHECK(has(number));
    return of(number).reads | of(number).writes;
  }
};

// The names of the listed stages.
std::vector<std::string> listed_stages(std::span<const Stage> stages);

// Gives each buffer of `bytes` a place: buffers share memory if the last stage that touches one
// comes before the first that touches the other. Returns the bytes of all, which never exceed those
// of the buffers side by side. Throws Error(kSizeOverflow).
size_t book_by_lifetime(std::span<const Stage> stages, std::span<const size_t> bytes,
                        std::span<WorkspaceSlice> slices);

// The buffers that have memory, with the stages between which they live.
std::vector<PlanBuffer> describe_buffers(std::span<const Stage> stages,
                                         std::span<const std::string_view> names,
                                         std::span<const WorkspaceSlice> slices);

// Which buffers of a chunk may still be asked for. What a stage declares is kept by hand: one that
// uses a buffer beyond its declared life would find there what a later buffer of the same memory
// holds.
class BufferTurns {
 public:
  // Notes that the buffer is asked for. False if one that shares its memory was asked for after it.
  bool take(std::span<const WorkspaceSlice> slices, size_t buffer);

 private:
  uint64_t taken_ = 0;
  uint64_t ended_ = 0;
};

// The buffers of one chunk, of which `given` may be asked for. `turns` watches them over all stages
// of the chunk; null where no two buffers share memory.
template <class Buffer>
class Scratch {
 public:
  Scratch(std::byte* workspace, std::span<const WorkspaceSlice> slices, BufferSet given,
          BufferTurns* turns = nullptr)
      : workspace_(workspace), slices_(slices), given_(given), turns_(turns) {}

  // The same memory for a stage that is given these buffers.
  Scratch only(BufferSet given) const {
    Scratch own = *this;
    own.given_ = given;
    return own;
  }
  bool gives(Buffer buffer) const { return given_.has(static_cast<size_t>(buffer)); }

  template <class T>
  T* at(Buffer buffer) const {
    return static_cast<T*>(static_cast<void*>(workspace_ + slice(buffer).offset));
  }
  // Null if the stage is not given it.
  template <class T>
  T* find(Buffer buffer) const {
    return gives(buffer) ? at<T>(buffer) : nullptr;
  }
  std::span<std::byte> bytes(Buffer buffer) const {
    return {workspace_ + slice(buffer).offset, slice(buffer).bytes};
  }
  // Hands on what an earlier stage made in the buffer, to a stage that is given the buffer.
  template <class T>
  const T& made(Buffer buffer, const T& value) const {
    static_cast<void>(slice(buffer));
    return value;
  }

 private:
  const WorkspaceSlice& slice(Buffer buffer) const {
    const auto number = static_cast<size_t>(buffer);
    CONCLAVE_DCHECK(gives(buffer));
    CONCLAVE_DCHECK(turns_ == nullptr || turns_->take(slices_, number));
    return slices_[number];
  }

  std::byte* workspace_;
  std::span<const WorkspaceSlice> slices_;
  BufferSet given_;
  BufferTurns* turns_;
};

}  // namespace conclave::inline v0
