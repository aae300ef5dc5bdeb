// Options of every command that computes: threads, instruction set, arithmetic.
#pragma once

#include "command_line.h"
#include "output/progress.h"
#include "output/table.h"
#include "ranks/rank_team.h"

#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/safetensors.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::tool {

struct MachineOptions {
  std::string device;   // "cpu", "cuda:0"; empty: CONCLAVE_DEVICE, or the CPU
  int32_t threads = 0;  // 0: CONCLAVE_NUM_THREADS, OMP_NUM_THREADS, or all usable CPUs
  std::string isa;
  std::string arithmetic;
  std::string kernel;
  std::string tuning;  // a file of measured choices
  std::string determinism = "repeatable";
  std::string weights = "packed";  // or "in-place"
  bool pin_threads = false;
};
// Adds -t,--threads.
void add_threads_option(Command& command, MachineOptions& options);
// Adds --threads and --isa, then calls add_layer_options.
void add_machine_options(Command& command, MachineOptions& options);
// Adds --device, --tuning, --determinism, --arithmetic, --kernel, --pin-threads.
void add_layer_options(Command& command, MachineOptions& options);
// Adds --weights, for commands that read a model.
void add_weights_option(Command& command, MachineOptions& options);
// The access that weights in place need.
FileAccess file_access(const MachineOptions& options);

Context make_context(const MachineOptions& options, LogSink* log);
// The context of one rank of a team. Ranks that share this machine share its threads, unless
// --threads says how many each has.
Context make_context(const MachineOptions& options, LogSink* log, const RankTeam& team);
LayerOptions layer_options(const MachineOptions& options, int64_t max_tokens);

// Names what computes: "avx512 f32_fma", or the device.
std::string compute_text(const Plan& plan);

// Returns "conclave 0.2.0 (14cffc2): Intel Xeon Platinum 8581C, 2 threads".
std::string machine_line(const Context& context);
// Contains version, commit, cpu and threads.
nlohmann::ordered_json machine_facts(const Context& context);

// The options --format and --no-progress.
struct OutputOptions {
  std::string format = "table";
  bool no_progress = false;

  ProgressMode progress() const { return no_progress ? ProgressMode::kOff : ProgressMode::kAuto; }
};
void add_format_option(Command& command, OutputOptions& options);
void add_progress_option(Command& command, OutputOptions& options);

// Throws Error(kOutOfMemory) if `bytes` exceed this machine's memory. This comes before the
// allocation, since Linux grants it and ends the process later.
void require_memory(uint64_t bytes, std::string_view what, std::string_view hint);

}  // namespace conclave::tool
