// What the row "nccl" says where it cannot connect, and what is asked of a library before it is
// used. Needs neither a GPU nor NCCL.
#include "comm/nccl/nccl_library.h"

#include "conclave/comm.h"
#include "conclave/error.h"
#include "conclave/interop/nccl.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave {
namespace {

using comm::find_nccl_among;

std::string refusal(const ConnectOptions& options) {
  try {
    static_cast<void>(connect("nccl", options));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    return error.what();
  }
  return "connected";
}

TEST(NcclRow, TheCatalogHasIt_WithWhatItIsOrWhyItIsNot) {
  const std::vector<TransportInfo> all = transports();
  const auto row = std::find_if(all.begin(), all.end(),
                                [](const TransportInfo& info) { return info.name == "nccl"; });
  ASSERT_NE(row, all.end());
  if (row->usable) {
    EXPECT_NE(row->reason.find("by NCCL 2."), std::string::npos) << row->reason;
  } else {
    EXPECT_FALSE(row->reason.empty());
  }
}

TEST(NcclRow, OptionsThatItCannotServe_AreRefusedFirst) {
  EXPECT_NE(refusal({.device = "cpu"}).find("memory of a GPU, not that of cpu"), std::string::npos);
  EXPECT_NE(refusal({.group = 1}).find("none to split"), std::string::npos);
  EXPECT_NE(refusal({.rank = 0, .size = 2}).find("`bootstrap`"), std::string::npos);
  const auto nobody = [](const std::string&) { return std::vector<std::string>(); };
  EXPECT_NE(refusal({.rank = 0, .size = 130, .exchange = nobody}).find("at most 129 ranks"),
            std::string::npos);
}

TEST(NcclRow, NoLauncherStartsItsRanks) {
  EXPECT_THROW(static_cast<void>(launch_command("nccl", 2)), Error);
}

TEST(NcclRow, AnApplicationsCommunicator_IsNeeded) {
  const auto alone = connect("local");
  try {
    static_cast<void>(make_nccl_communicator(nullptr, *alone));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNullPointer);
  }
}

TEST(NcclLibrary, AMissingOne_IsNamed) {
  const auto found = find_nccl_among({"/nowhere/libnccl.so.2"});
  EXPECT_FALSE(found.support);
  EXPECT_NE(found.support.reason().find("/nowhere/libnccl.so.2"), std::string::npos)
      << found.support.reason();
}

TEST(NcclLibrary, AnOldOne_IsRefusedByItsVersion) {
  const auto found = find_nccl_among({CONCLAVE_TEST_OLD_NCCL});
  EXPECT_FALSE(found.support);
  EXPECT_NE(found.support.reason().find("NCCL 2.10.3; 2.18.0 or newer"), std::string::npos)
      << found.support.reason();
}

TEST(NcclLibrary, OneThatLacksFunctions_IsRefusedByTheFirst) {
  const auto found = find_nccl_among({CONCLAVE_TEST_BARE_NCCL});
  EXPECT_FALSE(found.support);
  EXPECT_NE(found.support.reason().find("has no ncclGetUniqueId"), std::string::npos)
      << found.support.reason();
}

TEST(NcclLibrary, OneThatFails_SaysSo) {
  const auto found = find_nccl_among({CONCLAVE_TEST_BROKEN_NCCL});
  EXPECT_FALSE(found.support);
  EXPECT_NE(found.support.reason().find("error 3"), std::string::npos) << found.support.reason();
}

TEST(NcclLibrary, TheFirstUsableFile_IsTaken) {
  const auto found = find_nccl_among({"/nowhere/libnccl.so.2", CONCLAVE_TEST_OLD_NCCL});
  EXPECT_EQ(found.library.version, 21003);
  EXPECT_EQ(comm::nccl_version_text(22907), "2.29.7");
}

}  // namespace
}  // namespace conclave
