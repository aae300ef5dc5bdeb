// Shapes, shared memory and parameters of the kernels that stream weights.
#pragma once

#include "activation/device/device_activation.h"
#include "core/device_flow.h"
#include "experts/cuda/common/vocabulary.h"
#include "experts/cuda/sm90/code_values.h"

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <type_traits>

namespace conclave::inline v0::experts::stream {

// Numbers of token rows that a kernel can multiply at once, ascending: a tile takes the narrowest
// that holds its rows. Each width needs its own code; where tensor time counts, most are 8 apart.
constexpr int kMostWidths = 8;
struct Widths {
  int of[kMostWidths] = {};
  int count = 0;
};
constexpr Widths widths(int max_tokens) {
  switch (max_tokens) {
    case 16:
      return {{8, 16}, 2};
    case 32:
      return {{16, 32}, 2};
    case 80:
      return {{16, 48, 64, 80}, 4};
    case 96:
      return {{32, 64, 80, 96}, 4};
    case 144:
      return {{64, 72, 80, 96, 128, 144}, 6};
    case 160:
      return {{64, 96, 112, 120, 128, 136, 144, 160}, 8};
    case 256:
      return {{72, 96, 128, 144, 176, 224, 256}, 7};
    default:
      return {{16, 32, 48, 64}, 4};
  }
}

// The shape of a kernel. Kernels for many rows per expert are limited by how often L2 delivers each
// token, and so have 256 weight rows instead of 128.
struct Shape {
  int max_tokens = 0;
  int weight_rows = 128;
  int atoms = 1;  // per stage, of 128 bytes of K
  int stages = 4;
  Scaling scaling = Scaling::kNone;
  // Stages requested at once, so that neighbours in memory come from one page of it.
  int burst = 1;
  // The up product reads rows that were copied into sorted order, by TMA as the down product does:
  // gathering them costs a quarter of the time of a product that is not limited by memory.
  bool sorted = false;
  int consumers = 2;  // warpgroups that multiply
  // Tokens have a ring of so many stages of an atom each, if it is not that of the weights.
  int token_stages = 0;
};

// Scales of weights that bf16 holds exactly.
enum class ExactScales : uint8_t { kNone, kPowers, kFloats };

// Weights that are codes ask this of a kernel.
struct Codes {
  int bits = 0;  // 0: weights are elements
  // Sums of so many times 16 columns have one scale.
  int steps_of_sum = 2;
  // w = value scale - offset; with `rounded`, or (value - zero) scale unless codes are in order.
  bool offsets = false;
  bool zeros = false;  // with `rounded` and `in_order`: w = (value - zero) scale
  // Values of bf16 that add up to a code's.
  int terms = 1;
  // CodeOrder::kLanesOfNumbers, where code c stands for c + CodedParams::least without a table.
  bool in_order = false;
  bool in_pairs = false;  // CodeOrder::kLanesOfPairs
  // Weights are rounded to bf16, factors and all, so that sums need none: for many rows, beside
  // whose sums there is no room for those of a few columns.
  bool rounded = false;
  // With `rounded`: a scale is that of a whole row, so that sums are multiplied by it, and nothing
  // is rounded.
  bool whole_rows = false;
  // Codes of lanes, whose products with these scales need no rounding: sums need no scales.
  ExactScales exact = ExactScales::kNone;
  // Scales are FactorForm::kScaleSteps, or with `offsets` both FactorForm::kSteps.
  bool steps = false;
};

// Bytes whose scales are FactorForm::kScaleSteps: these are int8.
constexpr bool are_scaled_bytes(const Codes& codes) {
  return codes.bits == 8 && codes.steps && !codes.offsets;
}
// Codes of up to 4 bits whose scales are steps of 16 columns: whole numbers are multiplied by each
// other, and sums of a stage by the steps' units.
constexpr bool multiply_steps(const Codes& codes) {
  return codes.bits <= 4 && codes.steps && codes.steps_of_sum == 1;
}
// Codes of 2 bits, of which scale and offset are steps too: both of a group in a byte.
constexpr bool are_small(const Codes& codes) { return codes.bits == 2; }
// True if values come from a table in shared memory, and not from arithmetic.
constexpr bool takes_table(const Codes& codes) {
  return !codes.in_order && codes.exact == ExactScales::kNone && !are_scaled_bytes(codes);
}

// One block per multiprocessor: warpgroups multiply 64 or 128 weight rows each, and one more fills
// the ring. There are two of them, or three or four where they decode codes: these wait for their
// own lookups, and others use the time. The ring is as deep as shared memory allows: a
// multiprocessor must keep 64 KiB of weights in flight for its share of the memory's rate.
//
// Weights are elements like those of the rows, or codes that consumers decode to such elements: the
// codes of a stage are one box of 128 bytes of K.
template <class Element_, Shape kShape, Codes kCodes_ = Codes{}>
struct Config {
  using Element = Element_;
  static constexpr Codes kCodes = kCodes_;
  static constexpr int kCodeBits = kCodes.bits;
  static constexpr bool kIsCoded = kCodeBits != 0;
  static constexpr bool kRounds = kCodes.rounded;
  static constexpr bool kIsExact = kCodes.exact != ExactScales::kNone;
  static constexpr bool kHasLanes = kCodes.in_order || kCodes.in_pairs;
  using Output = std::conditional_t<std::is_same_v<Element, __half>, __half, __nv_bfloat16>;
  static constexpr int kMaxTokens = kShape.max_tokens;
  static constexpr Widths kWidths = widths(kMaxTokens);
  static constexpr int kWeightRows = kShape.weight_rows;
  static constexpr int kConsumers = kShape.consumers;
  static constexpr int kSlices =
      kWeightRows / 64 / kConsumers;  // each warpgroup has so many times 64 rows
  static constexpr Scaling kScaling = kShape.scaling;
  static constexpr bool kIsByte = kScaling != Scaling::kNone;
  // Sums of integers are exact: they stay in wgmma's accumulators over all of K.
  static constexpr bool kIsInteger = std::is_same_v<Element, int8_t>;
  static constexpr bool kBlockScales = kScaling == Scaling::kBlock;
  static constexpr int kAtoms = kShape.atoms;
  static constexpr int kStages = kShape.stages;
  static constexpr int kBurst = kShape.burst;
  static constexpr bool kSorted = kShape.sorted;
  // Results are stored in lines of 128 bytes or more, collected from the warps of a warpgroup.
  static constexpr bool kWholeLines = (kShape.sorted && kSlices == 2 && !kIsByte) || kRounds;
  static constexpr int kAtomBytes = 128;
  static constexpr int kAtomDepth = kAtomBytes / static_cast<int>(sizeof(Element));
  static constexpr int kDepth = kAtoms * kAtomDepth;
  // A row of weights has so many in an atom, or in a stage of codes.
  static constexpr int kLineBytes = kIsCoded ? kDepth * kCodeBits / 8 : kAtomBytes;
  static constexpr int kWeightBytes = kWeightRows * kLineBytes;
  static constexpr int kWeightAtoms = kIsCoded ? 1 : kAtoms;
  static constexpr int kTokenBytes = kMaxTokens * kAtomBytes;
  static constexpr bool kHasTokenRing = kShape.token_stages != 0;
  static constexpr int kTokenStages = kHasTokenRing ? kShape.token_stages : kStages;
  static constexpr int kTokenAtoms = kHasTokenRing ? 1 : kAtoms;
  // Rows of a TMA box of tokens; a tile takes as many boxes as its rows need.
  static constexpr int kTokenBox = kMaxTokens == 144 ? 48 : kMaxTokens % 32 == 0 ? 32 : 16;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kGatherWarps = 3;
  static constexpr int kThreads = 32 * (kConsumerWarps + 1 + kGatherWarps);
  // 384 threads have 168 registers each; accumulators beyond 112, and codes that are decoded while
  // others are multiplied, need registers that the producers give up.
  static constexpr bool kMovesRegisters =
      kIsCoded || kMaxTokens / 2 * (kSlices + (kIsByte ? 1 : 0)) > 112;
  static constexpr uint32_t kConsumerRegisters = kConsumers == 2   ? 224
                                                 : kConsumers == 3 ? 152
                                                                   : 104;
  static constexpr uint32_t kProducerRegisters = 56;
  // Warps that ask for more than a block was given at its launch would wait for ever.
  static constexpr uint32_t kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(128 * (kConsumers * kConsumerRegisters + kProducerRegisters) <=
                kThreads * kLaunchRegisters);
  // Stages of weights that the down product prefetches to L2 while it waits: 256 KiB per block.
  static constexpr int kStagesAhead = (256 << 10) / (kWeightAtoms * kWeightBytes);
  // Experts with more rows than a tile holds are cut evenly: a last tile of few rows would read all
  // weights for them. With few rows per expert such experts are rare, and finding them always costs
  // time.
  static constexpr bool kCutsEvenly = kMaxTokens > 96;
  // The thread that loads weights draws items from a counter and tells the others through a ring.
  // The ring needs no signal that a slot is free: each item in flight holds at least one of kStages
  // stages, and only one item is drawn ahead.
  static constexpr int kItems = kStages + 3;
  // An item of the up product is counted once by all of its block, where these meet behind it
  // anyhow, or else by each of its warps.
  static constexpr uint32_t kCountsOfItem = kIsByte ? 1 : kConsumerWarps;
  static_assert(kMaxTokens % kTokenBox == 0 && kMaxTokens % 8 == 0 && kWeightRows % 64 == 0);
  static_assert(kWidths.of[kWidths.count - 1] == kMaxTokens);
  static_assert(!kIsInteger || kScaling == Scaling::kRow);
  static_assert(!kIsCoded || (kLineBytes == (are_small(kCodes) ? 64 : 128) && kSlices == 1));
  static_assert(kRounds == kHasTokenRing && (!kRounds || kSorted));

  // Where a stage's weights begin along K, in elements of their tensor map.
  static __device__ __forceinline__ int32_t weight_column(int32_t stage, int atom) {
    return kIsCoded ? stage * kLineBytes : stage * kDepth + atom * kAtomDepth;
  }
};

// A token tile times a tile of weight rows. An item without rows means that none is left.
struct Item {
  TokenTile tile;
  int32_t feature_tile = 0;
  int32_t tile_index = 0;
};

// Shared memory in which the up product of rows of bytes turns its values into codes.
template <class Config>
struct CodeStaging {
  static constexpr int kTokens = Config::kIsByte ? Config::kMaxTokens : 1;
  // Each row has 16 bytes after its codes, so that lanes of a warp use different banks.
  alignas(16) uint8_t codes[kTokens][kScaleGroup + 16];
  // A token's step takes the place of its magnitudes: the thread that makes it has read them all.
  union {
    float largest[Config::kConsumerWarps][kTokens];
    struct {
      float factor[kTokens];
      float inverse[kTokens];
    } steps;
  };
};

// Result rows of each warpgroup before they are stored: one half is filled while the other is
// stored. A half has 32 rows of 64 bytes a slice or 16 of 128, with 16 bytes after each, so that 8
// rows begin in different banks.
template <class Config>
struct LineStaging {
  static constexpr int kBytes = Config::kWholeLines ? 32 * (64 * Config::kSlices + 16) : 16;
  alignas(16) uint8_t halves[Config::kConsumers][2][kBytes];
};

// Consumers need this to decode a stage's codes: the values of a byte, then their second terms, or
// both terms of a code as stored, a copy for each lane of a warp so that no two use the same bank;
// and factors of the weight rows for each group of columns, scales first and offsets or zero points
// behind them.
template <Codes kCodes, int kStages, int kDepth, int kRows>
struct CodeStorage {
  static constexpr int kGroups = kCodes.whole_rows ? 1 : kDepth / 16 / kCodes.steps_of_sum;
  static constexpr bool kHasZeros =
      !kCodes.in_pairs && (!kCodes.rounded || kCodes.whole_rows || kCodes.zeros);
  static constexpr int kBytesOfStep = kCodes.offsets && !are_small(kCodes) ? 2 : 1;
  static constexpr int kBytesOfGroup = kRows * (kCodes.steps     ? kBytesOfStep
                                                : kCodes.offsets ? 8
                                                : kHasZeros      ? 6
                                                                 : 4);
  static constexpr int kUnitsAt = kGroups * kBytesOfGroup;  // behind the steps
  static constexpr int kBytesOfUnits = kCodes.steps ? kRows * 4 * kBytesOfStep : 0;
  static constexpr int kValues = !takes_table(kCodes)                   ? 1
                                 : kCodes.terms == 1 || kCodes.in_pairs ? 256 * kCodes.terms
                                                                        : 1 << kCodes.bits;
  alignas(128) uint8_t factors[kStages][kUnitsAt + kBytesOfUnits];
  alignas(128) uint32_t values[kValues][32];
};
template <int kStages, int kDepth, int kRows>
struct CodeStorage<Codes{}, kStages, kDepth, kRows> {};
template <Codes kCodes, int kStages, int kDepth, int kRows>
  requires(kCodes.exact != ExactScales::kNone)
struct CodeStorage<kCodes, kStages, kDepth, kRows> {
  static constexpr int kGroups = kDepth / 16 / kCodes.steps_of_sum;
  alignas(128) uint8_t factors[kStages][kGroups * kRows];  // scales
};

template <class Config>
struct SharedStorage {
  // The pattern of the 128-byte swizzle repeats every 1024 bytes.
  alignas(1024) uint8_t weights[Config::kStages][Config::kWeightAtoms][Config::kWeightBytes];
  alignas(1024) uint8_t tokens[Config::kTokenStages][Config::kTokenAtoms][Config::kTokenBytes];
  alignas(16) float token_scales[Config::kStages][Config::kAtoms]
                                [Config::kBlockScales ? Config::kMaxTokens : 4];
  float weight_scales[Config::kStages][Config::kAtoms][2];
  [[no_unique_address]] CodeStorage<Config::kCodes, Config::kStages, Config::kDepth,
                                    Config::kWeightRows>
      codes;
  union {
    alignas(16) uint8_t scratch[Config::kConsumerWarps][512];
    CodeStaging<Config> staging;
    LineStaging<Config> lines;
  };
  int32_t source_rows[Config::kGatherWarps][Config::kSorted ? 1 : Config::kMaxTokens];
  Item items[Config::kItems];
  uint64_t item_full[Config::kItems];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];
  uint64_t tokens_full[Config::kHasTokenRing ? Config::kTokenStages : 1];
  uint64_t tokens_empty[Config::kHasTokenRing ? Config::kTokenStages : 1];
};

// Scales of products of bytes. Blocks are 128 columns of K.
struct ScaleParams {
  // The scale of token row r (up: of the input; down: sorted) and block b lies at tokens[r *
  // row_stride + b * block_stride]; `constant`, if not null, replaces them all.
  const float* tokens = nullptr;
  int64_t row_stride = 1;
  int64_t block_stride = 1;
  const float* constant = nullptr;
  // Weight scales: one per block of rows and columns, or one per row. Those of up rows lie
  // half_stride after those of gate rows.
  const float* weights = nullptr;
  int64_t expert_stride = 0;
  int64_t half_stride = 0;
  int32_t blocks = 0;  // along K
  // Scales of the codes that the up product writes: one per row and 128 features, stored at
  // output[feature / 128, row], or output_constant for all. With dynamic row scales, it writes
  // float32 instead.
  float* output = nullptr;
  int64_t output_stride = 0;
  const float* output_constant = nullptr;
  bool power_of_two = false;
};

// Counters of the down product, in the workspace. The up product clears them.
struct HandOver {
  uint32_t drawn = 0;  // items, beyond each block's first
  uint32_t ended = 0;  // blocks that found no item left
};

struct Params {
  CUtensorMap weights;  // up with a gate: {K, 8, 2, I / 8, E}; else {K, rows, E}
  CUtensorMap rows;     // down: the intermediate {I, rows}; up: sorted rows {H, rows}
  TokenTile* tiles = nullptr;
  const int32_t* num_tiles = nullptr;
  const int32_t* expert_begin = nullptr;
  int32_t tile_tokens = 0;  // rows of a full tile, as grouped
  const int32_t* row_slot = nullptr;
  int32_t top_k = 1;
  const void* input = nullptr;  // up: token rows
  int64_t input_stride = 0;     // elements
  const float* bias = nullptr;  // [E, 2I], [E, I] or [E, H]; or null
  const float* input_weights = nullptr;
  void* output = nullptr;  // up: [sorted rows, stride]; down: [slots, stride]
  int64_t output_stride = 0;
  int32_t features = 0;  // per output row: I or H
  int32_t feature_tiles = 0;
  int32_t depth = 0;         // K in elements
  int32_t depth_stages = 0;  // K in stages
  bool wide_stores = true;   // output rows are 16-byte aligned
  activation::DeviceActivation activation;
  ScaleParams scales;
  HandOver* hand_over = nullptr;
  void* tickets = nullptr;  // TicketCounter, for the up product
  // The down product begins an item when this many items of the up product have stored its rows,
  // which those count, kCountsOfItem times; 0: when the launch of the up product is done, and
  // nothing is counted.
  uint32_t items_before = 0;
  // Up: the kernel before this one has waited for the grouping, so tiles can be read before the
  // wait.
  bool groups_are_done = false;
  // Down: makes results what combine would make of a token's only row.
  bool finishes_rows = false;
  const float* finish_weights = nullptr;  // per slot, or null
  float finish_scale = 1;
};

// Parameters of a product whose weights are codes: w = (value - zero) scale, or value scale -
// offset.
struct CodedParams : Params {
  // {rows, gate and up, groups of columns, E}, with boxes of a stage's groups: float32 scales, and
  // bf16 zero points or, for kernels of them, float32 offsets. {rows, groups, E} of
  // FactorForm::kExact: bytes. Where it has_steps: pairs of these, and their units as `shifts`.
  CUtensorMap scales;
  CUtensorMap shifts;
  int32_t shift_bytes = 0;      // each zero point or offset has these; 0: none
  int32_t group = 0;            // columns of a group
  int32_t groups_of_stage = 1;  // also where a group has more columns than a stage
  int32_t steps_shift = 0;      // a group has 16 << steps_shift columns of a stage
  int32_t features_of_tile = 0;
  // FactorForm::kExact: a ByteForm, and [E, gate and up].
  const int32_t* byte_form = nullptr;
  const float* sum_factors = nullptr;
  const int32_t* short_scales = nullptr;  // not 0: all scales or steps are (short_scales.h)
  // Sums of a row are multiplied by these, for row r (up: of the input; down: sorted) at
  // row_factors[r * row_factor_stride]; null: nothing.
  const float* row_factors = nullptr;
  int32_t row_factor_stride = 1;
  // Up: stages 2 i and 2 i + 1 of the rows, two terms of the same columns, meet the weights' stage
  // i if this is 1; 0: rows have one term.
  int32_t terms_shift = 0;
  // Up: results are multiplied by these, [E, features]; null: by nothing.
  const float* column_factors = nullptr;
  // Up: results are float32 [sorted rows, stride], which become values of codes.
  bool stores_floats = false;
  Bf16Values values;  // for kernels that take a table
  int32_t least = 0;  // the value of code 0, for kernels of codes in order
};

// True if TMA loads the token rows; otherwise warps gather them.
template <class Config, Product kProduct>
inline constexpr bool kRowsInOrder = kProduct == Product::kDown || Config::kSorted;

}  // namespace conclave::inline v0::experts::stream
