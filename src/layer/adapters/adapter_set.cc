#include "layer/adapters/adapter_set.h"

#include "layer/arguments.h"

#include "conclave/error.h"

#include <algorithm>
#include <bit>
#include <set>
#include <string_view>
#include <utility>

namespace conclave::inline v0 {
namespace {

// FNV-1a. Keys are compared as signed numbers and their negatives, so that the sign stays free.
class Key {
 public:
  explicit Key(int64_t before) : hash_(static_cast<uint64_t>(before) ^ 0xCBF29CE484222325) {}
  void add(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001B3; }
  int64_t value() const { return static_cast<int64_t>(hash_ >> 1U); }

 private:
  uint64_t hash_;
};

// All ranks see the same of an adapter, whichever experts they hold.
int64_t key_with(int64_t before, const LoraAdapter& adapter) {
  Key key(before);
  for (const LoraFactors& factors : adapter.factors) {
    key.add(static_cast<uint64_t>(factors.mlp) << 8U | static_cast<uint64_t>(factors.matrix));
    key.add(static_cast<uint64_t>(factors.expert));
    key.add(static_cast<uint64_t>(factors.a.shape[0]));
    key.add(std::bit_cast<uint64_t>(factors.scale));
  }
  return key.value();
}

int64_t key_without(int64_t before, AdapterId id) {
  Key key(before);
  key.add(~static_cast<uint64_t>(id));
  return key.value();
}

std::string known_ids(const AdapterSet& set) {
  if (set.empty()) return "none: no adapter was added";
  std::string text;
  for (const HeldAdapter& held : set.adapters) {
    text += (text.empty() ? "" : ", ") + std::to_string(held.info.id);
  }
  return text;
}

[[noreturn]] void refuse_id(const std::string& what, int64_t id, const AdapterSet& set) {
  throw Error(ErrorCode::kInvalidArgument, {.what = "no adapter of this layer has this id",
                                            .tensor = what,
                                            .expected = known_ids(set),
                                            .found = std::to_string(id)});
}

void check_either(const ForwardArgs& args) {
  if (args.adapter_ids.empty() || args.adapter == kNoAdapter) return;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "give either adapter_ids or adapter", .tensor = "adapter"});
}

}  // namespace

int64_t AdapterSet::find(int64_t id) const {
  const auto at = std::ranges::lower_bound(
      adapters, id, {}, [](const HeldAdapter& held) { return static_cast<int64_t>(held.info.id); });
  if (at == adapters.end() || at->info.id != id) return -1;
  return at - adapters.begin();
}

AdapterSetPointer AdapterStore::current() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

void AdapterStore::replace(std::vector<HeldAdapter> adapters, int64_t key,
                           const MakeAdapterTable& make_table) {
  auto next = std::make_shared<AdapterSet>();
  next->table = make_table(adapters);
  next->adapters = std::move(adapters);
  next->key = key;
  const std::lock_guard lock(mutex_);
  current_ = std::move(next);
}

AdapterId AdapterStore::add(const LoraAdapter& adapter, std::shared_ptr<const EngineAdapter> packed,
                            const MakeAdapterTable& make_table) {
  const std::lock_guard changing(changes_);
  const AdapterSetPointer before = current();
  AdapterInfo info{.id = next_id_,
                   .name = adapter.name,
                   .num_factors = static_cast<int64_t>(adapter.factors.size()),
                   .bytes = packed->bytes()};
  for (const LoraFactors& factors : adapter.factors) {
    info.max_rank = std::max(info.max_rank, factors.a.shape[0]);
  }
  std::vector<HeldAdapter> adapters = before->adapters;
  adapters.push_back({.info = std::move(info), .packed = std::move(packed)});
  replace(std::move(adapters), key_with(before->key, adapter), make_table);
  return next_id_++;
}

void AdapterStore::remove(AdapterId id, const MakeAdapterTable& make_table) {
  const std::lock_guard changing(changes_);
  const AdapterSetPointer before = current();
  const int64_t at = before->find(id);
  if (at < 0) refuse_id("id", id, *before);
  std::vector<HeldAdapter> adapters = before->adapters;
  adapters.erase(adapters.begin() + at);
  replace(std::move(adapters), key_without(before->key, id), make_table);
}

void AdapterStore::keep_for_graphs(AdapterSetPointer set) {
  const std::lock_guard lock(mutex_);
  if (std::ranges::find(captured_, set) == captured_.end()) captured_.push_back(std::move(set));
}

size_t AdapterStore::bytes_only_in(std::span<const AdapterSetPointer> sets) const {
  std::set<const EngineAdapter*> counted;
  for (const HeldAdapter& held : current_->adapters) counted.insert(held.packed.get());
  size_t bytes = 0;
  for (const AdapterSetPointer& set : sets) {
    for (const HeldAdapter& held : set->adapters) {
      if (counted.insert(held.packed.get()).second) bytes += held.info.bytes;
    }
  }
  return bytes;
}

size_t AdapterStore::graph_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_only_in(captured_);
}

// Ends of sets wait for the device: forwards that look up the current one must not wait for them.
size_t AdapterStore::forget_graphs() {
  std::vector<AdapterSetPointer> ended;
  const std::lock_guard lock(mutex_);
  ended.swap(captured_);
  return bytes_only_in(ended);
}

bool check_adapter_ids(const ForwardArgs& args, int64_t tokens, const AdapterSet& set) {
  check_either(args);
  if (args.adapter_ids.empty()) {
    if (args.adapter == kNoAdapter) return false;
    if (set.find(args.adapter) < 0) refuse_id("adapter", args.adapter, set);
    return true;
  }
  bool names_some = false;
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t id = load_token_id(args.adapter_ids, token);
    if (id == kNoAdapter) continue;
    if (set.find(id) < 0) refuse_id("adapter_ids[" + std::to_string(token) + "]", id, set);
    names_some = true;
  }
  return names_some;
}

bool check_unseen_adapter_ids(const ForwardArgs& args, const AdapterSet& set,
                              const LayerOptions& options) {
  check_either(args);
  if (args.adapter != kNoAdapter && set.find(args.adapter) < 0) {
    refuse_id("adapter", args.adapter, set);
  }
  if (!args.adapter_ids.empty() && options.max_adapter_rank == 0) {
    throw Error(ErrorCode::kState, {.what = "this layer was made without room for adapters",
                                    .tensor = "adapter_ids",
                                    .expected = "a layer made with LayerOptions.max_adapter_rank"});
  }
  return names_adapters(args);
}

bool names_adapters(const ForwardArgs& args) {
  return !args.adapter_ids.empty() || args.adapter != kNoAdapter;
}

void refuse_adapters(const ForwardArgs& args, const Support& support) {
  if (support) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = "this device takes no adapters",
               .tensor = args.adapter_ids.empty() ? "adapter" : "adapter_ids",
               .hint = support.reason()});
}

void check_adapters_stay(const AdapterSet& set, const Support& support) {
  if (set.empty() || support) return;
  throw Error(ErrorCode::kState,
              {.what = "the weights of experts that have adapters do not change on this device",
               .found = support.reason(),
               .hint = "remove the adapters before, and add them again behind"});
}

uint32_t adapter_mark(const ForwardArgs& args, int64_t token, const AdapterSet& set) {
  const int64_t id =
      args.adapter_ids.empty() ? args.adapter : load_token_id(args.adapter_ids, token);
  return id == kNoAdapter ? 0 : static_cast<uint32_t>(set.find(id) + 1);
}

}  // namespace conclave::inline v0
