#include "comm/message/shared_verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace conclave::inline v0::comm {

// Precedes the proposals, one for each rank.
struct SharedVerdict::Page {
  std::atomic<int32_t> first;  // 1 + the rank whose proposal holds; 0: not settled
};
static_assert(std::atomic<int32_t>::is_always_lock_free, "processes share it");

namespace {

constexpr size_t kHeaderBytes = 64;

size_t whole_pages(int32_t ranks) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const auto n = static_cast<size_t>(ranks);
  return (kHeaderBytes + n * n + page - 1) / page * page;
}

}  // namespace

SharedFile::SharedFile(int descriptor, int32_t ranks)
    : descriptor_(descriptor), region_bytes_(whole_pages(ranks)) {}

std::shared_ptr<SharedFile> SharedFile::make(int32_t ranks) {
  const int descriptor = ::memfd_create("conclave-ranks", MFD_CLOEXEC);
  return descriptor < 0 ? nullptr : std::make_shared<SharedFile>(descriptor, ranks);
}

std::shared_ptr<SharedFile> SharedFile::open(int64_t pid, int32_t descriptor, int32_t ranks) {
  if (descriptor < 0) return nullptr;
  std::array<char, 64> path{};
  fmt::format_to_n(path.data(), path.size() - 1, "/proc/{}/fd/{}", pid, descriptor);
  const int mine = ::open(path.data(), O_RDWR | O_CLOEXEC);
  if (mine < 0) return nullptr;
  auto file = std::make_shared<SharedFile>(mine, ranks);
  struct stat facts {};
  // Another file under that number would be the peer's own.
  const bool is_one = ::fstat(mine, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_nlink == 0;
  return is_one ? file : nullptr;
}

SharedFile::~SharedFile() { ::close(descriptor_); }

std::unique_ptr<Verdict> SharedFile::verdict(uint64_t epoch, const std::vector<int32_t>& members,
                                             int32_t me) {
  const auto length = static_cast<off_t>(region_bytes_);
  const auto offset = static_cast<off_t>(epoch) * length;
  // This makes the file longer and never shorter, whichever rank comes last.
  if (::posix_fallocate(descriptor_, offset, length) != 0) return nullptr;
  void* const memory =
      ::mmap(nullptr, region_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, offset);
  if (memory == MAP_FAILED) return nullptr;
  return std::make_unique<SharedVerdict>(static_cast<std::byte*>(memory), region_bytes_,
                                         static_cast<int32_t>(members.size()), me);
}

SharedVerdict::SharedVerdict(std::byte* memory, size_t bytes, int32_t ranks, int32_t me)
    : memory_(memory), bytes_(bytes), ranks_(ranks), me_(me) {}

SharedVerdict::~SharedVerdict() { ::munmap(memory_, bytes_); }

SharedVerdict::Page& SharedVerdict::page() const {
  return *std::launder(reinterpret_cast<Page*>(memory_));
}

std::byte* SharedVerdict::proposal(int32_t rank) const {
  return memory_ + kHeaderBytes + static_cast<size_t>(rank) * static_cast<size_t>(ranks_);
}

std::optional<Present> SharedVerdict::read() {
  const int32_t first = page().first.load(std::memory_order_acquire);
  if (first <= 0 || first > ranks_) return std::nullopt;
  Present present(static_cast<size_t>(ranks_));
  std::memcpy(present.data(), proposal(first - 1), present.size());
  return present;
}

std::optional<Present> SharedVerdict::settle(const Present& mine) {
  std::memcpy(proposal(me_), mine.data(), mine.size());
  int32_t open = 0;
  page().first.compare_exchange_strong(open, me_ + 1, std::memory_order_acq_rel);
  return read();
}

}  // namespace conclave::inline v0::comm
