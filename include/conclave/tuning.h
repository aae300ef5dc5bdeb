// Measured choices of kernels, as data. `conclave bench --tune` writes them and
// LayerOptions::tuning hands them to a layer; its built-in rule serves sizes that the table has no
// entry for.
#pragma once

#include "conclave/dtype.h"
#include "conclave/spec.h"
#include "conclave/version.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// The problem that a choice was measured for. num_experts and intermediate_size are one rank's.
struct TuningKey {
  std::string device;  // as the driver names it: "NVIDIA H200"
  std::string
      format;  // "bf16", "f16", "e4m3.block", "int8.channel", "e4m3.tensor", "int4.block1x32"
  int64_t num_experts = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t top_k = 0;
  friend bool operator==(const TuningKey&, const TuningKey&) = default;
};
// The format's name in a key.
CONCLAVE_API std::string tuning_format(DType weight_dtype, const QuantSpec& quant);

// A choice for calls of up to `tokens` tokens, down to the next smaller entry of the same key.
struct TuningEntry {
  TuningKey key;
  int64_t tokens = 0;
  std::string kernel;  // row of the kernel table: "cuda.stream_sm90"
  std::string tile;    // as `conclave explain` prints it; empty for kernels without tiles
  double microseconds = 0;
};

// The text form has one line per entry, after a line that names the version:
//   conclave-tuning 1
//   NVIDIA H200 | bf16 | E 128 H 2048 I 768 k 8 | T 64 | cuda.stream_sm90 | 16x128x128B, 6 stages
//   | 71.5
// Empty lines and lines that begin with # are passed over. Immutable once handed to a layer.
class CONCLAVE_API TuningTable {
 public:
  // `name` stands for the text in messages. Throws Error(kTuningSyntax) naming the line,
  // Error(kTuningVersion) for a table of another version.
  static TuningTable parse(std::string_view text, std::string_view name = "tuning table");
  // Throws as parse, and Error(kFileNotFound, kFileAccess, kFileNotRegular, kFileRead).
  static TuningTable load(const std::filesystem::path& path);

  std::string to_text() const;
  // Replaces the entry of the same key and tokens.
  void set(TuningEntry entry);
  // The entry for a call of `tokens` tokens: that of the smallest T >= tokens, or null.
  const TuningEntry* find(const TuningKey& key, int64_t tokens) const noexcept;
  const std::vector<TuningEntry>& entries() const noexcept { return entries_; }

 private:
  std::vector<TuningEntry> entries_;  // by key, then tokens
};

class Context;
struct LayerOptions;
struct ParallelSpec;

// Every choice that a layer could make for calls of `tokens` tokens, without times: the list to
// measure. Empty on "cpu". Throws as make_plan.
CONCLAVE_API std::vector<TuningEntry> tuning_candidates(const Context& context, const MoeSpec& spec,
                                                        const LayerOptions& options,
                                                        const ParallelSpec& parallel,
                                                        int64_t tokens);

}  // namespace conclave::inline v0
