// Recorded routing: the experts and weights that every token had in every layer, kept in rings
// while layers run, written as safetensors, given back to other forwards, and compared.
#pragma once

#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/version.h"

#include <compare>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

// Names a token across batches and programs.
struct TokenKey {
  int64_t sequence = 0;
  int64_t position = 0;
  friend auto operator<=>(const TokenKey&, const TokenKey&) = default;
};

// A layer that is recorded, as far as its rows need it.
struct RecordedLayer {
  int64_t layer = 0;       // number in the model, 0 to 65535
  int64_t num_ids = 0;     // ids lie in [0, num_ids) or are -1
  int64_t num_slots = 0;   // columns of its rows
  uint64_t spec_hash = 0;  // every field of the spec is in it; 0: not known

  // Ids count experts, zero experts and shared experts with slots: num_slots(spec) columns.
  static CONCLAVE_API RecordedLayer of(int64_t layer, const MoeSpec& spec);
};

// Rows of one layer, in the order of their recording.
struct RecordedRows {
  RecordedLayer layer;
  std::vector<TokenKey> tokens;     // [T]
  std::vector<int32_t> topk_ids;    // [T, num_slots]
  std::vector<float> topk_weights;  // [T, num_slots]
  int64_t dropped_tokens = 0;       // recorded as well, but no longer here

  int64_t num_tokens() const noexcept { return static_cast<int64_t>(tokens.size()); }
};

// A record holds its rows by value. In memory and in files one token may occur more than once in a
// layer: the last row counts.
struct RoutingRecord {
  std::string model;
  std::string model_type;
  std::vector<RecordedRows> layers;  // ascending, each layer once

  // Reads a file that write() has made; docs/routing.md has the format. Throws Error: that of
  // SafetensorsFile; kConfigMissingKey, kConfigValue for its metadata; kTensorMissing,
  // kTensorUnexpected, kTensorShape, kTensorDType; kExpertId for an id that a layer has not.
  static CONCLAVE_API RoutingRecord open(const std::filesystem::path& path);
  // The file appears when it is whole. Throws Error(kFileWrite); kInvalidArgument for layers that
  // do not ascend, kShape for rows whose sizes disagree.
  CONCLAVE_API void write(const std::filesystem::path& path) const;
  // The rows of a layer, or null.
  CONCLAVE_API const RecordedRows* find(int64_t layer) const noexcept;
};

enum class WhenFull : uint8_t {
  kDropOldest,  // the ring goes on, and counts the tokens that it overwrites
  kDropNewest,  // keeps what it has, and counts the tokens that it does not take
  kError,       // Error(kState) before anything of the call is recorded
};

struct RecorderOptions {
  int64_t capacity = 65536;  // tokens of each layer, 1 to 2^40; booked when the recorder is made
  WhenFull when_full = WhenFull::kDropOldest;
  std::string model = {};
  std::string model_type = {};
};

// Rings of fixed size in host memory, one for each layer. Calls for different layers do not meet;
// those for one layer, and readers, wait for each other for as long as rows are copied. Forwards
// are not part of it: it is given what they have captured.
class CONCLAVE_API RoutingRecorder {
 public:
  // Throws Error(kInvalidArgument) for layers that are none, occur twice or have no slots, and for
  // the options; kOutOfMemory.
  RoutingRecorder(std::span<const RecordedLayer> layers, RecorderOptions options = {});
  RoutingRecorder(RoutingRecorder&&) noexcept;
  RoutingRecorder& operator=(RoutingRecorder&&) noexcept;
  ~RoutingRecorder();

  // Adds T tokens of a layer: ids [T, num_slots] int32 or int64, weights [T, num_slots] f32, as
  // ForwardArgs captures them; rows may be apart. Without `tokens` they are numbered on: sequence
  // 0, positions from the number of tokens that the layer was given before. All or nothing: throws
  // Error before anything is recorded. kInvalidArgument for a layer that is not recorded, kShape,
  // kDType, kStride, kNullPointer for an argument, kExpertId for an id that the layer has not,
  // kState with WhenFull::kError.
  void record(int64_t layer, const ConstTensorView& topk_ids, const ConstTensorView& topk_weights,
              std::span<const TokenKey> tokens = {});

  // Tokens that a layer was given since it was made or cleared, and those of them that are gone.
  // Throws Error(kInvalidArgument) for a layer that is not recorded.
  int64_t recorded_tokens(int64_t layer) const;
  int64_t dropped_tokens(int64_t layer) const;

  // Copies what is there. Layers are copied one after another: rows that come meanwhile may be
  // in later layers only.
  RoutingRecord snapshot() const;
  void write(const std::filesystem::path& path) const { snapshot().write(path); }
  // Forgets all rows and counts.
  void clear();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Finds recorded rows by token, for forwards of any batch: given as ForwardArgs::topk_ids and
// topk_weights they have the bits of the forward that was recorded, on a layer of the same plan and
// weights. Immutable: calls may run at the same time.
class CONCLAVE_API RoutingReplay {
 public:
  // Throws as RoutingRecord::write for rows whose sizes disagree.
  explicit RoutingReplay(RoutingRecord record);
  RoutingReplay(RoutingReplay&&) noexcept;
  RoutingReplay& operator=(RoutingReplay&&) noexcept;
  ~RoutingReplay();

  const RoutingRecord& record() const noexcept;
  bool has(int64_t layer, const TokenKey& token) const noexcept;
  // Writes the rows of `tokens` to ids [T, num_slots] int32 and weights [T, num_slots] f32; either
  // may be empty. Throws Error before anything is written: kInvalidArgument for a layer that was
  // not recorded and for a token that is not in it, naming both; kShape, kDType for an argument,
  // such as ids of a layer with another k.
  void find(int64_t layer, std::span<const TokenKey> tokens, const TensorView& topk_ids,
            const TensorView& topk_weights) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One token whose routing differs.
struct RoutingDifference {
  int64_t layer = 0;
  TokenKey token;
  std::vector<int32_t> first_ids;  // by slot
  std::vector<int32_t> second_ids;
  // The largest difference of an expert's weight, one that a side did not choose weighing 0. NaN
  // where a weight is NaN on one side.
  double weight_difference = 0;
};

struct LayerDifferences {
  int64_t layer = 0;
  int64_t compared = 0;       // tokens that both records have
  int64_t only_in_first = 0;  // tokens
  int64_t only_in_second = 0;
  int64_t other_experts = 0;  // tokens with another set of experts
  int64_t reordered = 0;      // with the same experts in other slots
  int64_t other_weights = 0;  // with the same experts in the same slots, and a weight of other bits
  double worst_weight_difference = 0;
  TokenKey worst_token;   // that has it
  bool same_spec = true;  // false: both hashes are known and differ

  bool equal() const noexcept {
    return only_in_first + only_in_second + other_experts + reordered + other_weights == 0;
  }
};

struct RoutingComparison {
  std::vector<LayerDifferences> layers;  // those that both records have
  std::vector<int64_t> only_in_first;    // layers
  std::vector<int64_t> only_in_second;
  std::vector<RoutingDifference> examples;  // the first ones, by layer and token

  // True if both have the same layers and tokens, with the same bits.
  CONCLAVE_API bool equal() const noexcept;
};

// Compares token by token, whatever the order of the rows. Throws Error(kShape) for a layer with
// other numbers of slots, and as RoutingReplay.
CONCLAVE_API RoutingComparison compare_routing(const RoutingRecord& first,
                                               const RoutingRecord& second,
                                               int64_t most_examples = 16);

}  // namespace conclave::inline v0
