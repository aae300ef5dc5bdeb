// Ranks that launchers without a library of their own have started, and GPUs that are not there.
#include "input/machine_options.h"
#include "ranks/meeting.h"
#include "ranks/rank_team.h"
#include "tool_process.h"

#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/error.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave::testing {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Words = std::vector<std::string>;

// The environment of rank `rank`, by torchrun or by srun.
using Launcher = Words (*)(int32_t rank, int32_t size, const std::string& id);

Words by_torchrun(int32_t rank, int32_t size, const std::string& id) {
  return {"RANK=" + std::to_string(rank),
          "WORLD_SIZE=" + std::to_string(size),
          "LOCAL_RANK=" + std::to_string(rank),
          "LOCAL_WORLD_SIZE=" + std::to_string(size),
          "MASTER_ADDR=127.0.0.1",
          "MASTER_PORT=29500",
          "TORCHELASTIC_RUN_ID=" + id,
          "TORCHELASTIC_RESTART_COUNT=0"};
}

Words by_srun(int32_t rank, int32_t size, const std::string& id) {
  return {"SLURM_PROCID=" + std::to_string(rank), "SLURM_STEP_NUM_TASKS=" + std::to_string(size),
          "SLURM_STEP_NUM_NODES=1", "SLURM_JOB_ID=" + id, "SLURM_STEP_ID=0"};
}

// Other runs of this test meet elsewhere.
std::string id_of(const char* name) { return std::string(name) + std::to_string(::getpid()); }

// Each rank's process ended with one of these.
std::vector<ToolResult> run_launched(Launcher launcher, int32_t size, const std::string& id,
                                     const Words& words) {
  std::vector<ToolResult> results(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      results[static_cast<size_t>(rank)] =
          run_tool(words, {.environment = launcher(rank, size, id)});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(LaunchedRanks, OfTorchrunAndSrun_WriteTheBytesOfOneRank) {
  const ScratchDirectory scratch;
  const Words run = {"run", bundled("qwen3-moe-tiny"), "--random", "7", "--repetitions", "1"};
  const auto with_output = [&](const std::string& file, const Words& more = {}) {
    Words words = run;
    words.insert(words.end(), {"--output", file});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const std::string one = scratch / "one";
  ASSERT_EQ(run_tool(with_output(one)).exit_code, 0);
  for (const Launcher launcher : {by_torchrun, by_srun}) {
    const std::string file = scratch / "ranks";
    const auto results =
        run_launched(launcher, 3, id_of("bytes"), with_output(file, {"--transport", "tcp"}));
    for (size_t rank = 0; rank < results.size(); ++rank) {
      EXPECT_EQ(results[rank].exit_code, 0) << rank << results[rank].err;
      EXPECT_EQ(results[rank].out.empty(), rank != 0) << results[rank].out;
      EXPECT_EQ(results[rank].err, "");
    }
    EXPECT_NE(results[0].out.find("3 ranks by tcp"), std::string::npos) << results[0].out;
    EXPECT_EQ(read_text(file), read_text(one));
    std::filesystem::remove(file);
  }
}

TEST(LaunchedRanks, AnErrorOfOne_IsSaidOnceAndTheStatusOfAll) {
  const auto results =
      run_launched(by_torchrun, 3, id_of("error"), {"run", "/no/such/model", "--transport", "tcp"});
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].exit_code, 3) << rank << results[rank].err;
    EXPECT_EQ(results[rank].err.find("[kFileNotFound]") != std::string::npos, rank == 0)
        << results[rank].err;
  }
}

TEST(LaunchedRanks, ARankThatDoesNotCome_IsNamedByTheDeadline) {
  const auto begin = std::chrono::steady_clock::now();
  const ToolResult alone =
      run_tool({"run", bundled("olmoe-tiny"), "--transport", "tcp", "--rank-timeout", "1"},
               {.environment = by_torchrun(0, 2, id_of("missing"))});
  EXPECT_EQ(alone.exit_code, 6) << alone.err;
  EXPECT_NE(alone.err.find("[kCommTimeout]: rank 1"), std::string::npos) << alone.err;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
}

TEST(LaunchedRanks, WhatALauncherCannotHaveMeant_IsWrongUsage) {
  struct Case {
    Words environment;
    Words more;
    int exit_code;
    const char* text;
  };
  const auto changed = [](Words words, const std::string& variable) {
    const std::string name = variable.substr(0, variable.find('=') + 1);
    std::erase_if(words, [&](const std::string& word) { return word.starts_with(name); });
    words.push_back(variable);
    return words;
  };
  const Words two = by_torchrun(1, 2, id_of("usage"));
  const Case cases[] = {{changed(two, "RANK=one"), {}, 2, "RANK"},
                        {changed(two, "RANK=2"), {}, 2, "below 2"},
                        {changed(two, "WORLD_SIZE=-2"), {}, 2, "WORLD_SIZE"},
                        {changed(two, "LOCAL_WORLD_SIZE=1"), {}, 3, "mpirun"},
                        {changed(by_srun(1, 2, "1"), "SLURM_STEP_NUM_NODES=2"), {}, 3, "mpirun"}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    const ToolResult result = run_tool({"run", bundled("olmoe-tiny"), "--transport", "tcp"},
                                       {.environment = c.environment});
    EXPECT_EQ(result.exit_code, c.exit_code) << result.err;
    EXPECT_NE(result.err.find(c.text), std::string::npos) << result.err;
  }
  const auto results =
      run_launched(by_torchrun, 2, id_of("number"),
                   {"run", bundled("olmoe-tiny"), "--transport", "tcp", "--ranks", "3"});
  for (const ToolResult& result : results) EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(results[0].err.find("another number of ranks"), std::string::npos) << results[0].err;
}

TEST(FileMeetings, TextsOfRanksThatHaveEnded_AreNotTaken) {
  const ScratchDirectory scratch;
  const std::string folder = scratch / "meeting";
  tool::FileMeeting first(folder, 0, 2, 200ms);
  write_text(folder + "/0.1", "1000000000 7\nan old place");
  try {
    first.exchange("here");
    FAIL() << "a text of no living process was taken";
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCommTimeout);
    EXPECT_EQ(error.peer(), 1);
  }
}

TEST(FileMeetings, EveryRank_GetsTheTextsOfAll) {
  const ScratchDirectory scratch;
  const std::string folder = scratch / "meeting";
  std::vector<std::vector<std::string>> found(3);
  std::vector<std::unique_ptr<tool::FileMeeting>> meetings(3);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      auto& meeting = meetings[static_cast<size_t>(rank)];
      meeting = std::make_unique<tool::FileMeeting>(folder, rank, 3, 20s);
      for (const char* round : {"a", "b\n"}) {
        const auto texts = meeting->exchange(round + std::to_string(rank));
        auto& mine = found[static_cast<size_t>(rank)];
        mine.insert(mine.end(), texts.begin(), texts.end());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& texts : found) {
    EXPECT_EQ(texts, (Words{"a0", "a1", "a2", "b\n0", "b\n1", "b\n2"}));
  }
  meetings.clear();
  EXPECT_FALSE(std::filesystem::exists(folder)) << "something is left behind";
}

TEST(FileMeetings, ATextThatCannotBeSaid_LeavesNothingBehind) {
  const ScratchDirectory scratch;
  const std::string folder = scratch / "meeting";
  {
    tool::FileMeeting meeting(folder, 0, 1, 20s);
    std::filesystem::create_directory(folder + "/0.0");
    try {
      meeting.exchange("here");
      ADD_FAILURE() << "a text took the place of a folder";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFileWrite);
    }
    EXPECT_TRUE(std::filesystem::exists(folder + "/0.0.new"));
  }
  EXPECT_FALSE(std::filesystem::exists(folder + "/0.0.new"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/0.0")) << "it is of somebody else";
}

TEST(FileMeetings, AFolderThatOthersMayWrite_IsRefused) {
  const ScratchDirectory scratch;
  const std::string folder = scratch / "meeting";
  std::filesystem::create_directory(folder);
  std::filesystem::permissions(folder, std::filesystem::perms::all);
  const auto refused = [](const std::string& place) {
    try {
      tool::FileMeeting meeting(place, 0, 2, 1s);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode{0};
  };
  EXPECT_EQ(refused(folder), ErrorCode::kFileWrite);
  std::filesystem::create_directory_symlink(scratch.path(), scratch / "link");
  EXPECT_EQ(refused(scratch / "link"), ErrorCode::kFileWrite);
  EXPECT_EQ(refused(scratch / "no" / "such"), ErrorCode::kFileWrite);
}

// Machines that have GPUs run these commands instead: rank_gpus_test.cc.
class WithoutGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      const Context first({.device = "cuda:0", .num_threads = 1});
    } catch (const Error&) {
      return;
    }
    GTEST_SKIP() << "this machine has a GPU";
  }
};

TEST_F(WithoutGpus, RanksOfNccl_AreRefusedWithTheReasonOfDoctor) {
  const ToolResult doctor =
      run_tool({"doctor", "--quick", "--json"}, {.environment = {"LSAN_OPTIONS=detect_leaks=0"}});
  ASSERT_EQ(doctor.exit_code, 0) << doctor.err;
  const nlohmann::json document = nlohmann::json::parse(doctor.out);
  const auto reason_in = [&](const char* list, const char* name) {
    for (const auto& entry : document[list]) {
      if (entry["name"] == name) return entry["reason"].get<std::string>();
    }
    return std::string("not listed");
  };
  // One truth about the library, wherever the system has it.
  EXPECT_EQ(reason_in("backends", "nccl"), reason_in("transports", "nccl"));
  const std::string why = reason_in("backends", "cuda");
  for (const char* command : {"run", "verify", "bench"}) {
    for (const char* ranks : {"1", "2"}) {
      SCOPED_TRACE(std::string(command) + " " + ranks);
      Words words = {command, "--ranks", ranks, "--transport", "nccl"};
      if (std::string(command) != "bench") words.push_back(bundled("olmoe-tiny"));
      const ToolResult result = run_tool(words);
      EXPECT_EQ(result.exit_code, 3) << result.err;
      EXPECT_NE(result.err.find("[kUnsupported]"), std::string::npos) << result.err;
      EXPECT_NE(result.err.find("fewer GPUs than ranks"), std::string::npos) << result.err;
      EXPECT_NE(result.err.find("conclave doctor"), std::string::npos) << result.err;
      EXPECT_NE(result.err.find("--transport local, tcp or mpi"), std::string::npos) << result.err;
      EXPECT_EQ(result.out, "");
      const size_t begin = result.err.find("0: ");
      ASSERT_NE(begin, std::string::npos) << result.err;
      const std::string reason =
          result.err.substr(begin + 3, result.err.find('\n', begin) - begin - 3);
      EXPECT_NE(why.find(reason), std::string::npos) << reason << " is not " << why;
    }
  }
}

TEST_F(WithoutGpus, LaunchedRanksOfNccl_SayOnceWhichHasNone) {
  const auto results = run_launched(by_torchrun, 2, id_of("gpus"),
                                    {"run", bundled("olmoe-tiny"), "--transport", "nccl"});
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].exit_code, 3) << results[rank].err;
    EXPECT_EQ(results[rank].err.find("rank 0 has no GPU of its own") != std::string::npos,
              rank == 0)
        << results[rank].err;
  }
}

TEST(RanksWithAGpuEach, ADeviceForAllOfThem_IsRefused) {
  const auto group = make_local_group({.num_ranks = 2});
  const auto alone = make_local_group({.num_ranks = 1});
  tool::RankTeam team(*group[0], *group[0], *alone[0]);
  team.use_device("cuda:7");
  for (const char* device : {"cpu", "cuda:0"}) {
    tool::MachineOptions options;
    options.device = device;
    try {
      tool::make_context(options, nullptr, team);
      FAIL() << device;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_EQ(error.detail().tensor, "--device");
    }
  }
}

}  // namespace
}  // namespace conclave::testing
