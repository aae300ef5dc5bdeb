#include "ranks/launchers.h"

#include "output/terminal.h"
#include "ranks/launch.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <unistd.h>

namespace conclave::tool {
namespace {

struct LauncherRow {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_size;          // ranks of this machine; null where the next says it
  const char* machines = nullptr;  // how many there are
  // These tell this launch from others of the same user on the machine.
  std::array<const char*, 4> key = {};
  // Ranks are children of one process, which is part of the key.
  bool same_parent = false;
  // Whether each rank keeps to the CPUs that the launcher gave it.
  bool binds = false;
};

constexpr std::array kLaunchers = {
    LauncherRow{
        .name = "torchrun",
        .rank = "RANK",
        .size = "WORLD_SIZE",
        .local_size = "LOCAL_WORLD_SIZE",
        .key = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"}},
    LauncherRow{.name = "mpirun",
                .rank = "OMPI_COMM_WORLD_RANK",
                .size = "OMPI_COMM_WORLD_SIZE",
                .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
                .key = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
                .binds = true},
    LauncherRow{.name = "mpiexec",
                .rank = "PMI_RANK",
                .size = "PMI_SIZE",
                .local_size = "MPI_LOCALNRANKS",
                .same_parent = true,
                .binds = true},
    LauncherRow{.name = "srun",
                .rank = "SLURM_PROCID",
                .size = "SLURM_STEP_NUM_TASKS",  // which a batch script's own shell has not
                .local_size = nullptr,
                .machines = "SLURM_STEP_NUM_NODES",
                .key = {"SLURM_JOB_ID", "SLURM_STEP_ID"},
                .binds = true},
};

int32_t number_of(const LauncherRow& row, const char* variable, int32_t lowest) {
  const std::string text = environment_value(variable);
  int32_t number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem == std::errc() && end == text.data() + text.size() && number >= lowest) return number;
  throw Error(ErrorCode::kInvalidArgument,
              {.what = fmt::format("{} has left no number in {}", row.name, variable),
               .tensor = variable,
               .expected = fmt::format("{} or more", lowest),
               .found = text});
}

// All ranks of the launch have the same one, whatever else runs on the machine.
std::string folder_of(const LauncherRow& row) {
  std::string key = row.name;
  for (const char* const variable : row.key) {
    if (variable != nullptr) key += "\n" + environment_value(variable);
  }
  if (row.same_parent) key += fmt::format("\n{}", ::getppid());
  const std::string name = fmt::format("conclave-meeting-{}-{:016x}", ::getuid(), hash_of(key));
  return (std::filesystem::temp_directory_path() / name).string();
}

void check_one_machine(const LauncherRow& row, int32_t size, int32_t here) {
  const int32_t machines =
      row.machines == nullptr ? (here < size ? 2 : 1) : number_of(row, row.machines, 1);
  if (machines == 1) return;
  throw Error(ErrorCode::kUnsupported,
              {.what = fmt::format("ranks that {} has started meet on one machine", row.name),
               .tensor = "--transport",
               .expected = fmt::format("all {} ranks here", size),
               .found = "ranks of other machines",
               .hint = "start them by the mpirun of a build with MPI, over which they meet"});
}

LaunchedRank rank_of(const LauncherRow& row, int32_t size) {
  const int32_t rank = number_of(row, row.rank, 0);
  if (rank >= size) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = fmt::format("{} has started no such rank", row.name),
                 .tensor = row.rank,
                 .expected = fmt::format("below {}, as {} says", size, row.size),
                 .found = std::to_string(rank)});
  }
  const bool says = row.local_size != nullptr && !environment_value(row.local_size).empty();
  const int32_t here = says ? number_of(row, row.local_size, 1) : size;
  check_one_machine(row, size, here);
  return {.launcher = row.name,
          .rank = rank,
          .size = size,
          .ranks_here = row.binds ? 1 : here,
          .meeting = folder_of(row)};
}

bool is_set(const char* variable) { return !environment_value(variable).empty(); }

}  // namespace

uint64_t hash_of(std::string_view text) noexcept {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3U;
  }
  return hash;
}

bool is_rank_of_tool() { return is_set(kRankVariable) && was_launched_here(); }

std::optional<LaunchedRank> launched_rank() {
  if (is_rank_of_tool()) {
    const LauncherRow own{.name = "conclave",
                          .rank = kRankVariable,
                          .size = kRanksVariable,
                          .local_size = kRanksVariable};
    LaunchedRank rank = rank_of(own, number_of(own, kRanksVariable, 1));
    rank.meeting = meeting_of_reports();
    return rank;
  }
  for (const LauncherRow& row : kLaunchers) {
    if (!is_set(row.rank) || !is_set(row.size)) continue;
    const int32_t size = number_of(row, row.size, 1);
    if (size > 1) return rank_of(row, size);
  }
  return std::nullopt;
}

}  // namespace conclave::tool
