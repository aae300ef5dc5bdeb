#include "layer/stages/table.h"

#include "core/checked.h"
#include "core/dcheck.h"

#include "conclave/error.h"

#include <algorithm>

namespace conclave::inline v0 {
namespace {

// The first and the last stage that touch a buffer; `first` lies behind `last` if none does.
struct Lifetime {
  size_t first = 1;
  size_t last = 0;

  bool meets(const Lifetime& other) const { return first <= other.last && other.first <= last; }
};

Lifetime lifetime_of(std::span<const Stage> stages, size_t buffer) {
  Lifetime life;
  bool touched = false;
  for (size_t i = 0; i < stages.size(); ++i) {
    if (!(stages[i].reads | stages[i].writes).has(buffer)) continue;
    if (!touched) life.first = i;
    touched = true;
    life.last = i;
  }
  return life;
}

size_t end_of(const WorkspaceSlice& slice) {
  const auto rounded = checked_add(slice.bytes, kWorkspaceAlignment - 1);
  const auto end =
      rounded ? checked_add(slice.offset, *rounded / kWorkspaceAlignment * kWorkspaceAlignment)
              : std::nullopt;
  if (end && *end <= static_cast<size_t>(INT64_MAX)) return *end;
  throw Error(ErrorCode::kSizeOverflow, "the workspace exceeds 63 bits");
}

// A buffer that has its place.
struct Placed {
  Lifetime life;
  size_t begin = 0;
  size_t end = 0;
};

// The lowest place that no buffer of the same time takes. `placed` is sorted by begin.
WorkspaceSlice lowest_place(const std::vector<Placed>& placed, const Lifetime& life, size_t bytes) {
  WorkspaceSlice slice{.offset = 0, .bytes = bytes};
  for (const Placed& other : placed) {
    if (!life.meets(other.life) || other.end <= slice.offset) continue;
    if (end_of(slice) <= other.begin) break;
    slice.offset = other.end;
  }
  return slice;
}

// The buffers with memory, the largest first: a small one that lives long would otherwise split the
// memory that large ones could have one after another.
std::vector<size_t> booking_order(std::span<const size_t> bytes) {
  std::vector<size_t> order;
  for (size_t buffer = 0; buffer < bytes.size(); ++buffer) {
    if (bytes[buffer] != 0) order.push_back(buffer);
  }
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return bytes[a] > bytes[b]; });
  return order;
}

}  // namespace

std::vector<std::string> listed_stages(std::span<const Stage> stages) {
  std::vector<std::string> names;
  for (const Stage& stage : stages) {
    if (stage.listed && !stage.name.empty()) names.push_back(stage.name);
  }
  return names;
}

size_t book_by_lifetime(std::span<const Stage> stages, std::span<const size_t> bytes,
                        std::span<WorkspaceSlice> slices) {
  std::vector<Placed> placed;
  size_t total = 0;
  for (const size_t buffer : booking_order(bytes)) {
    const Lifetime life = lifetime_of(stages, buffer);
    CONCLAVE_DCHECK(life.first <= life.last);
    slices[buffer] = lowest_place(placed, life, bytes[buffer]);
    const Placed place{.life = life, .begin = slices[buffer].offset, .end = end_of(slices[buffer])};
    const auto behind = [](size_t begin, const Placed& it) { return begin < it.begin; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), place.begin, behind), place);
    total = std::max(total, place.end);
  }
  return total;
}

bool BufferTurns::take(std::span<const WorkspaceSlice> slices, size_t buffer) {
  const auto bit = [](size_t number) { return uint64_t{1} << number; };
  if ((ended_ & bit(buffer)) != 0) return false;
  taken_ |= bit(buffer);
  const WorkspaceSlice& mine = slices[buffer];
  for (size_t other = 0; other < slices.size(); ++other) {
    if (other == buffer || (taken_ & bit(other)) == 0) continue;
    const WorkspaceSlice& its = slices[other];
    const bool is_apart =
        its.offset + its.bytes <= mine.offset || mine.offset + mine.bytes <= its.offset;
    if (!is_apart) ended_ |= bit(other);
  }
  return true;
}

std::vector<PlanBuffer> describe_buffers(std::span<const Stage> stages,
                                         std::span<const std::string_view> names,
                                         std::span<const WorkspaceSlice> slices) {
  std::vector<PlanBuffer> buffers;
  for (size_t i = 0; i < names.size(); ++i) {
    if (slices[i].bytes == 0) continue;
    const Lifetime life = lifetime_of(stages, i);
    if (life.first > life.last) continue;
    buffers.push_back({.name = std::string(names[i]),
                       .bytes = slices[i].bytes,
                       .first_stage = stages[life.first].name,
                       .last_stage = stages[life.last].name});
  }
  return buffers;
}

}  // namespace conclave::inline v0
