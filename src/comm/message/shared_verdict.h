// Memory in which processes of one host settle who is left of them. Messages cannot do that where
// half of the ranks are silent: nobody knows whether they are dead or about to settle it as well.
// One word of memory that is written once has one value for all.
#pragma once

#include "comm/message/verdict.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace conclave::inline v0::comm {

// A file without a name, in memory, which each of `ranks` ranks and later fewer of them have open.
// It ends with the last of them.
class SharedFile final : public VerdictPlace {
 public:
  // Null where the system does not give one.
  static std::shared_ptr<SharedFile> make(int32_t ranks);
  // Opens what process `pid` of this host has open as `descriptor`. Null where that is not allowed.
  static std::shared_ptr<SharedFile> open(int64_t pid, int32_t descriptor, int32_t ranks);

  SharedFile(int descriptor, int32_t ranks);
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  ~SharedFile() override;
  std::unique_ptr<Verdict> verdict(uint64_t epoch, const std::vector<int32_t>& members,
                                   int32_t me) override;
  int32_t descriptor() const { return descriptor_; }
  // The bytes of each roll call: whole pages, in which a byte for each pair of ranks has room.
  size_t region_bytes() const { return region_bytes_; }

 private:
  int descriptor_;
  size_t region_bytes_;
};

// The verdict of one roll call, at a place of its own in the file. Any process may
// die or stop between any two instructions of these functions: the others have their answer.
class SharedVerdict final : public Verdict {
 public:
  // Takes over the mapped memory of a region.
  SharedVerdict(std::byte* memory, size_t bytes, int32_t ranks, int32_t me);
  SharedVerdict(const SharedVerdict&) = delete;
  SharedVerdict& operator=(const SharedVerdict&) = delete;
  ~SharedVerdict() override;

  std::optional<Present> read() override;
  std::optional<Present> settle(const Present& mine) override;

 private:
  struct Page;
  Page& page() const;
  std::byte* proposal(int32_t rank) const;

  std::byte* memory_;
  size_t bytes_;
  int32_t ranks_;
  int32_t me_;
};

}  // namespace conclave::inline v0::comm
