// Finds names among many, and equal names, in O(n log n) for any names: entries are sorted by hash,
// equal hashes by text, so that crafted collisions cost no more than honest ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::inline v0::io {

class NameIndex {
 public:
  void reserve(size_t count) { entries_.reserve(count); }
  // `group` separates name spaces: equal names in different groups are different.
  void add(uint32_t group, std::string_view name, uint32_t item) {
    entries_.push_back({std::hash<std::string_view>{}(name), group, item});
  }

  // Sorts; call once, after the last add. `name_of(item)` is the item's name. Returns the first
  // pair of items found with the same group and name.
  template <class NameOf>
  std::optional<std::pair<uint32_t, uint32_t>> build(NameOf name_of) {
    std::sort(entries_.begin(), entries_.end(), [&](const Entry& a, const Entry& b) {
      if (a.group != b.group) return a.group < b.group;
      if (a.hash != b.hash) return a.hash < b.hash;
      const int order = name_of(a.item).compare(name_of(b.item));
      return order != 0 ? order < 0 : a.item < b.item;
    });
    const auto twin =
        std::adjacent_find(entries_.begin(), entries_.end(), [&](const Entry& a, const Entry& b) {
          return a.group == b.group && a.hash == b.hash && name_of(a.item) == name_of(b.item);
        });
    if (twin == entries_.end()) return std::nullopt;
    return std::pair{twin->item, std::next(twin)->item};
  }

  template <class NameOf>
  std::optional<uint32_t> find(uint32_t group, std::string_view name, NameOf name_of) const {
    const uint64_t hash = std::hash<std::string_view>{}(name);
    const auto at = std::lower_bound(entries_.begin(), entries_.end(), name,
                                     [&](const Entry& entry, std::string_view wanted) {
                                       if (entry.group != group) return entry.group < group;
                                       if (entry.hash != hash) return entry.hash < hash;
                                       return name_of(entry.item).compare(wanted) < 0;
                                     });
    if (at == entries_.end() || at->group != group || name_of(at->item) != name) {
      return std::nullopt;
    }
    return at->item;
  }

 private:
  struct Entry {
    uint64_t hash;
    uint32_t group;
    uint32_t item;
  };
  std::vector<Entry> entries_;
};

}  // namespace conclave::inline v0::io
