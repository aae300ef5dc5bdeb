// The adapters of a layer: which there are, and the switch from one set of them to the next.
#pragma once

#include "conclave/layer.h"
#include "conclave/lora.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// One adapter where an engine reads it.
class EngineAdapter {
 public:
  virtual ~EngineAdapter() = default;
  virtual size_t bytes() const = 0;
};

// All adapters of a set, as an engine's runner takes them: made with the set, so that a forward
// allocates nothing.
class EngineAdapterTable {
 public:
  virtual ~EngineAdapterTable() = default;
};

struct HeldAdapter {
  AdapterInfo info;
  std::shared_ptr<const EngineAdapter> packed;
};

// Immutable: a forward keeps the set with which it began.
struct AdapterSet {
  std::vector<HeldAdapter> adapters;  // by id
  std::shared_ptr<const EngineAdapterTable> table;
  // The same on all ranks that have added and removed the same adapters in the same order.
  int64_t key = 0;

  bool empty() const { return adapters.empty(); }
  // Where the adapter stands in the list, or -1.
  int64_t find(int64_t id) const;
};
using AdapterSetPointer = std::shared_ptr<const AdapterSet>;

// Makes the table of a set. Called while no other set is made.
using MakeAdapterTable =
    std::function<std::shared_ptr<const EngineAdapterTable>(std::span<const HeldAdapter>)>;

class AdapterStore {
 public:
  AdapterSetPointer current() const;
  // Both are safe beside current(), and beside each other.
  AdapterId add(const LoraAdapter& adapter, std::shared_ptr<const EngineAdapter> packed,
                const MakeAdapterTable& make_table);
  // Throws Error(kInvalidArgument) for an unknown id.
  void remove(AdapterId id, const MakeAdapterTable& make_table);

  // A graph of a captured forward reads the set at each launch, long after the call: it stays until
  // forget_graphs. Safe beside all others, as these are.
  void keep_for_graphs(AdapterSetPointer set);
  // The bytes of adapters that are here no more, but in sets that were kept.
  size_t graph_bytes() const;
  // Lets go of them, and returns their bytes.
  size_t forget_graphs();

 private:
  size_t bytes_only_in(std::span<const AdapterSetPointer> sets) const;  // under mutex_
  void replace(std::vector<HeldAdapter> adapters, int64_t key, const MakeAdapterTable& make_table);

  mutable std::mutex mutex_;
  std::mutex changes_;  // held while a set is made; mutex_ only while one is taken
  AdapterSetPointer current_ = std::make_shared<const AdapterSet>();
  std::vector<AdapterSetPointer> captured_;
  AdapterId next_id_ = 0;
};

// Throws Error(kInvalidArgument) for ids that are none of the set's, naming token and value.
// Returns whether a token has one of them.
bool check_adapter_ids(const ForwardArgs& args, int64_t tokens, const AdapterSet& set);

// The same for ids in a device's memory, which are not looked at, so that each may name one: the
// layer needs room for adapters.
bool check_unseen_adapter_ids(const ForwardArgs& args, const AdapterSet& set,
                              const LayerOptions& options);

// Whether a call names adapters. Reads no ids: they may lie in a device's memory.
bool names_adapters(const ForwardArgs& args);
// Throws Error(kUnsupported) where there is no support for adapters, naming the argument.
void refuse_adapters(const ForwardArgs& args, const Support& support);

// Throws Error(kState) where the set has adapters that would not stay what they are.
void check_adapters_stay(const AdapterSet& set, const Support& support);

// The mark of each token of a call or of a chunk of it: 0 without an adapter, otherwise one more
// than its place in the set.
uint32_t adapter_mark(const ForwardArgs& args, int64_t token, const AdapterSet& set);

}  // namespace conclave::inline v0
