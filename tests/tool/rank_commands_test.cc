// Runs conclave over several ranks: threads, and processes that it or a launcher starts.
#include "ranks/process_mark.h"
#include "tool_process.h"

#include "conclave/comm.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <sys/types.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave::testing {
namespace {

using Json = nlohmann::json;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Words = std::vector<std::string>;

Words joined(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// MPI and what it loads leave memory to the end of the process.
ToolResult run_ranks_of_tool(const Words& words) {
  return run_tool(words, {.environment = {"LSAN_OPTIONS=detect_leaks=0"}});
}

bool has_transport(const std::string& name) {
  for (const TransportInfo& info : transports()) {
    if (info.name == name) return info.usable;
  }
  return false;
}

class RankCommands : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!has_transport(GetParam())) GTEST_SKIP() << "this build has no " << GetParam();
  }
  Words over(const std::string& ranks, const Words& more = {}) const {
    return joined({"--ranks", ranks, "--transport", GetParam()}, more);
  }
};

// Rows of these models have a scale for the whole of them or for groups that slices cut, elements
// of 4, 6 and 8 bits, and in one of them shared experts beside.
TEST(RankSlices, ActivatedRows_AreJudgedByTheCodesOfTheirSlices) {
  for (const char* const model :
       {"mixtral-compressed-int8-token", "mixtral-compressed-channel", "qwen3_moe-fp8-stacked",
        "qwen2_moe-fp8-block-shared-bf16", "qwen3_moe-quark-fp4-rows",
        "mixtral-quark-fp6-e3m2-rows", "mixtral-quark-int8-static"}) {
    for (const char* const ranks : {"2", "3"}) {
      const ToolResult result = run_ranks_of_tool(
          {"verify", bundled(std::string("quantised/") + model), "--ranks", ranks, "--tp", ranks});
      EXPECT_EQ(result.exit_code, 0) << model << " on " << ranks << ": " << result.out;
      EXPECT_NE(result.out.find("layers within tolerance"), std::string::npos) << result.out;
    }
  }
}

TEST_P(RankCommands, Run_WritesTheBytesOfOneRank) {
  const ScratchDirectory scratch;
  const std::string model = bundled("qwen3-moe-tiny");
  const auto output_of = [&](const std::string& name, const Words& more) {
    const std::string file = scratch / name;
    const ToolResult result = run_ranks_of_tool(
        joined({"run", model, "--random", "7", "--output", file, "--repetitions", "1"}, more));
    EXPECT_EQ(result.exit_code, 0) << result.err << result.out;
    return read_text(file);
  };
  const std::string one = output_of("one", {});
  EXPECT_FALSE(one.empty());
  EXPECT_EQ(output_of("two", over("2")), one);
  // Seven tokens leave some of eight ranks without any.
  EXPECT_EQ(output_of("eight", over("8")), one);
}

TEST_P(RankCommands, Verify_PassesOverEveryKindOfSplit) {
  for (const Words& split : {over("3"), over("2", {"--tp", "2"}), over("4", {"--tp", "2"})}) {
    const ToolResult result =
        run_ranks_of_tool(joined({"verify", bundled("qwen2-moe-tiny"), "--format", "json"}, split));
    ASSERT_EQ(result.exit_code, 0) << result.err << result.out;
    const Json report = Json::parse(result.out);
    EXPECT_EQ(report["transport"], GetParam());
    EXPECT_EQ(report["ranks"], std::stoi(split[1]));
    EXPECT_EQ(report["ep_size"].get<int>() * report["tp_size"].get<int>(), report["ranks"]);
    EXPECT_TRUE(report["total"]["ok"]);
    EXPECT_EQ(report["total"]["tokens"], report["total"]["tokens_checked"]);
  }
}

TEST_P(RankCommands, Bench_CountsTheTokensOfAllRanks) {
  const ToolResult result =
      run_ranks_of_tool(joined({"bench", "-E", "8", "-k", "2", "-H", "64", "-I", "32", "-r", "2",
                                "--tokens", "16", "--format", "json"},
                               over("2")));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json report = Json::parse(result.out);
  const Json& row = report["results"].at(0);
  EXPECT_EQ(report["ranks"], 2);
  EXPECT_EQ(row["tokens"], 16);
  EXPECT_NEAR(row["tokens_per_s"].get<double>() * row["ms_mean"].get<double>() / 1e3, 32, 1);
  EXPECT_TRUE(row["fma_share"].is_null());
}

TEST_P(RankCommands, MissingModel_IsReportedOnceWithItsCode) {
  const ToolResult result = run_ranks_of_tool(joined({"run", "/no/such/model"}, over("3")));
  EXPECT_EQ(result.exit_code, 3) << result.err;
  const size_t first = result.err.find("[kFileNotFound]");
  ASSERT_NE(first, std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("[kFileNotFound]", first + 1), std::string::npos) << result.err;
}

TEST_P(RankCommands, RanksThatAreNoWholeGroups_AreWrongUsage) {
  const ToolResult result =
      run_ranks_of_tool(joined({"run", bundled("olmoe-tiny")}, over("3", {"--tp", "2"})));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("--tp"), std::string::npos) << result.err;
}

TEST_P(RankCommands, ResultOutsideTolerance_IsTheExitCodeOfAll) {
  const ToolResult result = run_ranks_of_tool(
      joined({"run", bundled("olmoe-tiny"), "--random", "4", "--tolerance", "1e-9"}, over("2")));
  EXPECT_EQ(result.exit_code, 1) << result.err << result.out;
}

INSTANTIATE_TEST_SUITE_P(Transports, RankCommands, ::testing::Values("local", "mpi", "tcp"),
                         [](const auto& instance) { return std::string(instance.param); });

class MpiProcesses : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_transport("mpi")) GTEST_SKIP() << "this build has no mpi";
  }
};

// Ranks that the tool itself has started.
using OwnProcesses = ::testing::Test;

// The process of a rank of the run that writes to `output`.
std::optional<pid_t> find_rank(const std::string& output, int32_t rank) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (read_text(entry.path() / "cmdline").find(output) == std::string::npos) continue;
    const std::string environment = read_text(entry.path() / "environ");
    for (const std::string variable : {"PMIX_RANK=", "PMI_RANK=", "CONCLAVE_RANK="}) {
      if (environment.find(variable + std::to_string(rank) + '\0') != std::string::npos) {
        return static_cast<pid_t>(std::stol(name));
      }
    }
  }
  return std::nullopt;
}

struct SignalledRun {
  ToolResult result;
  std::chrono::steady_clock::duration took{};  // from the signal to the end
};

// Sends the signal to a rank in the middle of a run that would last for minutes.
SignalledRun run_with_signal(const std::string& transport, int32_t victim, int signal) {
  const ScratchDirectory scratch;
  const std::string output = scratch / "results";
  std::atomic<bool> over{false};
  std::chrono::steady_clock::time_point sent;
  std::thread sender([&] {
    while (!over) {
      if (const auto pid = find_rank(output, victim)) {
        std::this_thread::sleep_for(1500ms);  // layers run by then
        sent = std::chrono::steady_clock::now();
        ::kill(*pid, signal);
        return;
      }
      std::this_thread::sleep_for(20ms);
    }
  });
  SignalledRun run;
  run.result = run_ranks_of_tool({"run", bundled("qwen3-moe-tiny"), "--ranks", "3", "--transport",
                                  transport, "--random", "256", "--repetitions", "100000",
                                  "--rank-timeout", "2", "--output", output});
  run.took = std::chrono::steady_clock::now() - sent;
  over = true;
  sender.join();
  EXPECT_FALSE(std::filesystem::exists(output)) << "a result that is not whole";
  return run;
}

TEST_F(MpiProcesses, KilledRank_IsNamedByATypedError) {
  const SignalledRun run = run_with_signal("mpi", 2, SIGKILL);
  EXPECT_EQ(run.result.exit_code, 6) << run.result.err;
  EXPECT_NE(run.result.err.find("[kCommPeerLost]: rank 2"), std::string::npos) << run.result.err;
  EXPECT_LT(run.took, 10s);
}

TEST_F(MpiProcesses, KilledLeader_IsNamedByTheStarter) {
  const SignalledRun run = run_with_signal("mpi", 0, SIGKILL);
  EXPECT_EQ(run.result.exit_code, 6) << run.result.err;
  EXPECT_NE(run.result.err.find("[kCommPeerLost]: rank 0"), std::string::npos) << run.result.err;
  EXPECT_LT(run.took, 15s);
}

TEST_F(MpiProcesses, StoppedRank_IsATimeoutAndIsEnded) {
  const SignalledRun run = run_with_signal("mpi", 1, SIGSTOP);
  EXPECT_EQ(run.result.exit_code, 6) << run.result.err;
  EXPECT_NE(run.result.err.find("[kCommTimeout]: rank 1"), std::string::npos) << run.result.err;
  EXPECT_LT(run.took, 25s);
}

TEST_F(OwnProcesses, KilledLeader_IsNamedByTheStarter) {
  const SignalledRun run = run_with_signal("tcp", 0, SIGKILL);
  EXPECT_EQ(run.result.exit_code, 6) << run.result.err;
  EXPECT_NE(run.result.err.find("[kCommPeerLost]: rank 0"), std::string::npos) << run.result.err;
  EXPECT_NE(run.result.err.find("ended by signal 9"), std::string::npos) << run.result.err;
  EXPECT_LT(run.took, 10s);
}

// It can say nothing itself: the starter does, and that it has ended it.
TEST_F(OwnProcesses, StoppedLeader_IsATimeoutThatTheStarterNames) {
  const SignalledRun run = run_with_signal("tcp", 0, SIGSTOP);
  EXPECT_EQ(run.result.exit_code, 6) << run.result.err;
  EXPECT_NE(run.result.err.find("[kCommTimeout]: rank 0"), std::string::npos) << run.result.err;
  EXPECT_NE(run.result.err.find("and was ended"), std::string::npos) << run.result.err;
  EXPECT_LT(run.took, 25s);
}

// Runs ranks for minutes with a directory of their own for temporary files, and sends the signal to
// the process that `find` finds, which the words of the run lead to.
SignalledRun run_and_signal(const ScratchDirectory& scratch, const std::string& transport,
                            int signal,
                            const std::function<std::optional<pid_t>(const std::string&)>& find) {
  const std::string output = scratch / "results";
  std::atomic<bool> over{false};
  std::chrono::steady_clock::time_point sent;
  std::thread sender([&] {
    for (; !over; std::this_thread::sleep_for(20ms)) {
      if (!find_rank(output, 1)) continue;
      std::this_thread::sleep_for(1500ms);  // layers run by then
      const auto pid = find(output);
      sent = std::chrono::steady_clock::now();
      if (pid) ::kill(*pid, signal);
      return;
    }
  });
  SignalledRun run;
  run.result = run_tool(
      {"run", bundled("qwen3-moe-tiny"), "--ranks", "2", "--transport", transport, "--random",
       "256", "--repetitions", "100000", "--rank-timeout", "2", "--output", output},
      {.environment = {"LSAN_OPTIONS=detect_leaks=0", "TMPDIR=" + scratch.path().string()}});
  run.took = std::chrono::steady_clock::now() - sent;
  over = true;
  sender.join();
  return run;
}

pid_t parent_of(pid_t pid) {
  const std::string stat = read_text("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(") ");
  return name_end == std::string::npos ? 0 : std::stoi(stat.substr(name_end + 4));
}

// The process between the test and its ranks that the test has started.
std::optional<pid_t> find_starter(const std::string& output) {
  auto pid = find_rank(output, 1);
  while (pid && *pid > 1 && parent_of(*pid) != ::getpid()) pid = parent_of(*pid);
  return pid && *pid > 1 ? pid : std::nullopt;
}

// The starter's child.
std::optional<pid_t> find_launcher(const std::string& output) {
  const auto starter = find_starter(output);
  auto pid = find_rank(output, 1);
  while (starter && pid && *pid > 1 && parent_of(*pid) != *starter) pid = parent_of(*pid);
  return starter && pid && *pid > 1 ? pid : std::nullopt;
}

int count_reports(const ScratchDirectory& scratch) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path())) {
    count += entry.path().filename().string().starts_with("conclave-ranks-") ? 1 : 0;
  }
  return count;
}

TEST_F(OwnProcesses, KilledStarter_IsCleanedUpByTheNext) {
  const ScratchDirectory scratch;
  const SignalledRun killed = run_and_signal(scratch, "tcp", SIGKILL, &find_starter);
  EXPECT_EQ(killed.result.exit_code, 128 + SIGKILL);
  EXPECT_EQ(count_reports(scratch), 1);
  // Those of others stay: without a name, of a process that lives, of another machine.
  const auto make = [&](const std::string& name, const std::string& starter) {
    std::filesystem::create_directory(scratch / name);
    if (!starter.empty()) write_text(scratch / (name + "/starter"), starter);
  };
  const std::string own = tool::process_mark(std::to_string(::getpid()));
  make("conclave-ranks-unnamed", "");
  make("conclave-ranks-living", tool::place_of_marks() + "\n" + own + "\n");
  make("conclave-ranks-elsewhere", "far away pid:[7]\n1 1\n");
  make("conclave-ranks-halfway", tool::place_of_marks() + "\n1 1");
  make("other", tool::place_of_marks() + "\n1 1\n");
  const ToolResult next = run_tool(
      {"run", bundled("qwen3-moe-tiny"), "--ranks", "2", "--transport", "tcp", "--random", "4"},
      {.environment = {"TMPDIR=" + scratch.path().string()}});
  EXPECT_EQ(next.exit_code, 0) << next.err;
  EXPECT_EQ(count_reports(scratch), 4);
  EXPECT_TRUE(std::filesystem::exists(scratch / "other"));
}

TEST_F(OwnProcesses, InterruptedStarter_EndsItsRanksAndLeavesNothing) {
  const ScratchDirectory scratch;
  const SignalledRun run = run_and_signal(scratch, "tcp", SIGINT, &find_starter);
  EXPECT_EQ(run.result.exit_code, 130) << run.result.err;
  EXPECT_NE(run.result.err.find("[kCancelled]"), std::string::npos) << run.result.err;
  EXPECT_LT(run.took, 15s);
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
  EXPECT_FALSE(find_rank(scratch / "results", 0));
}

TEST_F(MpiProcesses, StoppedLauncher_IsATimeoutAndIsEnded) {
  const ScratchDirectory scratch;
  const SignalledRun run = run_and_signal(scratch, "mpi", SIGSTOP, &find_launcher);
  EXPECT_EQ(run.result.exit_code, 6) << run.result.err;
  EXPECT_NE(run.result.err.find("[kCommTimeout]"), std::string::npos) << run.result.err;
  EXPECT_NE(run.result.err.find("launcher's process was stopped"), std::string::npos)
      << run.result.err;
  EXPECT_LT(run.took, 25s);
  EXPECT_EQ(count_reports(scratch), 0);
}

TEST_F(OwnProcesses, StoppedRank_IsATimeoutAndIsEnded) {
  const SignalledRun run = run_with_signal("tcp", 1, SIGSTOP);
  EXPECT_EQ(run.result.exit_code, 6) << run.result.err;
  EXPECT_NE(run.result.err.find("[kCommTimeout]: rank 1"), std::string::npos) << run.result.err;
  EXPECT_LT(run.took, 25s);
}

// While a rank loads, the others wait without a deadline, since nobody knows how long it takes.
TEST_F(OwnProcesses, RankThatIsStoppedWhileItLoads_IsEnded) {
  const ScratchDirectory scratch;
  const std::string model = scratch / "model";
  ASSERT_EQ(run_tool({"synth", "-E16", "-k2", "-H1024", "-I512", model}).exit_code, 0);
  for (const auto delay : {0ms, 60ms, 120ms}) {
    const std::string output = scratch / ("results" + std::to_string(delay.count()));
    std::atomic<bool> over{false};
    std::thread sender([&] {
      while (!over) {
        std::this_thread::sleep_for(5ms);
        const auto pid = find_rank(output, 1);
        if (!pid) continue;
        std::this_thread::sleep_for(150ms + delay);
        ::kill(*pid, SIGSTOP);
        return;
      }
    });
    const auto began = std::chrono::steady_clock::now();
    const ToolResult result =
        run_ranks_of_tool({"run", model, "--ranks", "3", "--transport", "tcp", "--random", "64",
                           "--repetitions", "100000", "--rank-timeout", "2", "--output", output});
    over = true;
    sender.join();
    EXPECT_EQ(result.exit_code, 6) << result.err;
    EXPECT_NE(result.err.find("rank 1"), std::string::npos) << result.err;
    EXPECT_LT(std::chrono::steady_clock::now() - began, 40s);
  }
}

TEST_F(MpiProcesses, Doctor_ConnectsAndShowsTheThreadLevel) {
  // A process without a launcher starts one of its own, which wants ssh in PATH.
  const ToolResult result =
      run_tool({"doctor", "--quick", "--json"},
               {.environment = {"LSAN_OPTIONS=detect_leaks=0", "PATH=/usr/bin:/bin"}});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json document = Json::parse(result.out);
  const auto reason_in = [&](const char* list) {
    for (const Json& entry : document[list]) {
      if (entry["name"] == "mpi" && entry["usable"].get<bool>()) {
        return entry["reason"].get<std::string>();
      }
    }
    return std::string("not usable");
  };
  EXPECT_NE(reason_in("transports").find("MPI_THREAD_"), std::string::npos)
      << reason_in("transports");
  EXPECT_NE(reason_in("backends").find("MPI 3."), std::string::npos) << reason_in("backends");
}

// Ranks of tcp meet over the ranks of MPI, wherever these are.
TEST_F(MpiProcesses, UnderALauncher_OtherTransportsMeetOverIt) {
  const ScratchDirectory scratch;
  std::string line;
  for (const std::string& word : launch_command("mpi", 4)) line += word + " ";
  const std::string log = scratch / "log";
  line += std::string(CONCLAVE_TOOL_PATH) + " verify " + bundled("olmoe-tiny") +
          " --transport tcp --tp 2 > " + log + " 2>&1";
  EXPECT_EQ(std::system(line.c_str()), 0) << read_text(log);
  EXPECT_NE(read_text(log).find("4 ranks by tcp: EP 2 x TP 2"), std::string::npos)
      << read_text(log);
}

TEST_F(MpiProcesses, UnderALauncher_RanksAreThoseItStarted) {
  const ScratchDirectory scratch;
  Words launcher = launch_command("mpi", 3);
  std::string line;
  for (const std::string& word : launcher) line += word + " ";
  const std::string tool = CONCLAVE_TOOL_PATH;
  const auto shell = [&](const std::string& arguments, const std::string& name) {
    const std::string command =
        line + tool + " " + arguments + " > " + (scratch / name).string() + " 2>&1";
    return std::system(command.c_str());
  };
  const std::string file = scratch / "ranks.safetensors";
  const std::string run = "run " + bundled("qwen3-moe-tiny") + " --random 7 --repetitions 1";
  EXPECT_EQ(shell(run + " --output " + file, "log"), 0);
  EXPECT_NE(read_text(scratch / "log").find("3 ranks by mpi"), std::string::npos)
      << read_text(scratch / "log");
  const std::string one = scratch / "one.safetensors";
  run_tool(
      {"run", bundled("qwen3-moe-tiny"), "--random", "7", "--repetitions", "1", "--output", one});
  EXPECT_EQ(read_text(file), read_text(one));
  shell(run + " --ranks 2", "wrong");
  EXPECT_NE(read_text(scratch / "wrong").find("another number of ranks"), std::string::npos)
      << read_text(scratch / "wrong");
}

}  // namespace
}  // namespace conclave::testing
