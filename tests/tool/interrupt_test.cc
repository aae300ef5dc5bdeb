// Ctrl-C: work that looks for it ends by an error and leaves nothing half written.
#include "interrupt.h"

#include "output/progress.h"
#include "tool_process.h"

#include "conclave/checkpoint.h"
#include "conclave/context.h"
#include "conclave/error.h"
#include "conclave/layer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave::tool {
namespace {

namespace fs = std::filesystem;
using std::chrono_literals::operator""ms;
using testing::ScratchDirectory;
using testing::ToolResult;

TEST(Interrupt, InAScope_IsAnErrorWhereWorkLooksForIt) {
  const InterruptScope outer;
  {
    const InterruptScope inner;
    EXPECT_NO_THROW(check_interrupt());
    std::raise(SIGTERM);
  }
  Console console(ProgressMode::kOff);
  try {
    console.progress("packing", 1, 2);
    FAIL() << "the signal was not seen";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCancelled);
    EXPECT_EQ(error.detail().found, "signal 15");
  }
}

TEST(Interrupt, OfALoad_IsThrownToTheCaller) {
  const Checkpoint checkpoint = Checkpoint::open(testing::bundled("mixtral-tiny"));
  const auto source = checkpoint.layer_source(0);
  const MoeSpec& spec = checkpoint.layer(0).spec;
  Console console(ProgressMode::kOff);
  const Context context({.num_threads = 2, .log = &console});
  {
    const InterruptScope scope;
    std::raise(SIGINT);
    try {
      MoeLayer::create(context, spec, *source);
      FAIL() << "the signal was not seen";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCancelled);
      EXPECT_EQ(error.detail().found, "SIGINT");
    }
  }
  const InterruptScope next;
  EXPECT_NO_THROW(MoeLayer::create(context, spec, *source));
}

TEST(InterruptDeathTest, SecondSignal_EndsTheProcess) {
  const auto twice = [] {
    const InterruptScope scope;
    std::raise(SIGINT);
    std::raise(SIGINT);
    ::_exit(0);
  };
  EXPECT_EXIT(twice(), ::testing::KilledBySignal(SIGINT), "");
}

TEST(InterruptDeathTest, ThatNobodyLooksFor_EndsTheProcessWithTheScope) {
  const auto unseen = [] {
    {
      const InterruptScope scope;
      std::raise(SIGTERM);
    }
    ::_exit(0);
  };
  EXPECT_EXIT(unseen(), ::testing::KilledBySignal(SIGTERM), "");
}

std::optional<pid_t> process_with(const std::string& argument) {
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const auto pid = static_cast<pid_t>(std::stol(name));
    if (pid == ::getpid()) continue;
    if (testing::read_text(entry.path() / "cmdline").find(argument) != std::string::npos) {
      return pid;
    }
  }
  return std::nullopt;
}

// Sends SIGINT to the tool, which has `argument` among its own, as soon as `is_time`.
ToolResult interrupted(const std::vector<std::string>& arguments, const std::string& argument,
                       const std::function<bool()>& is_time) {
  std::atomic<bool> over{false};
  std::thread sender([&] {
    for (; !over; std::this_thread::sleep_for(1ms)) {
      if (!is_time()) continue;
      if (const auto pid = process_with(argument)) ::kill(*pid, SIGINT);
      return;
    }
  });
  ToolResult result = testing::run_tool(arguments);
  over = true;
  sender.join();
  return result;
}

void expect_cancelled(const ToolResult& result) {
  EXPECT_EQ(result.exit_code, 130) << result.err;
  EXPECT_NE(result.err.find("[kCancelled]"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("SIGINT"), std::string::npos) << result.err;
}

class LongWork : public ::testing::Test {
 protected:
  std::vector<std::string> synth(const std::string& out) const {
    return {"synth", "-E8",          "-k2",  "-H1024",    "-I512", "--layers",
            "2",     "--shard-size", "10MB", "--threads", "1",     out};
  }
  const ScratchDirectory scratch_;
};

TEST_F(LongWork, InterruptedSynth_LeavesNoShards) {
  const std::string out = scratch_ / "model";
  const auto has_shard = [&] {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(out, ignored)) {
      if (entry.path().extension() == ".safetensors") return true;
    }
    return false;
  };
  expect_cancelled(interrupted(synth(out), out, has_shard));
  EXPECT_TRUE(fs::is_empty(out));
}

TEST_F(LongWork, InterruptedRun_LeavesNoResults) {
  const std::string out = scratch_ / "results";
  const auto has_begun = [&] { return !fs::is_empty(scratch_.path()); };
  expect_cancelled(interrupted({"run", testing::bundled("mixtral-tiny"), "--random", "64",
                                "--repetitions", "100000", "--output", out},
                               out, has_begun));
  EXPECT_TRUE(fs::is_empty(scratch_.path()));
}

TEST_F(LongWork, InterruptedConversion_GoesOnWhenItIsCalledAgain) {
  const std::string model = scratch_ / "model";
  const std::string out = scratch_ / "out";
  ASSERT_EQ(testing::run_tool(synth(model)).exit_code, 0);
  const std::vector<std::string> convert = {
      "convert",      model, out,        "--format", "int4-group32", "--scales", "search",
      "--shard-size", "5MB", "--tokens", "0",        "--threads",    "1"};
  const fs::path unfinished = out + ".partial";
  expect_cancelled(interrupted(convert, out, [&] { return fs::exists(unfinished); }));
  EXPECT_FALSE(fs::exists(out));
  if (fs::exists(unfinished)) {
    for (const auto& entry : fs::directory_iterator(unfinished)) {
      EXPECT_NE(entry.path().extension(), ".partial") << entry.path();
    }
  }
  const ToolResult again = testing::run_tool(convert);
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_FALSE(fs::exists(unfinished));
  EXPECT_EQ(Checkpoint::open(out).layers().size(), 2U);
}

}  // namespace
}  // namespace conclave::tool
