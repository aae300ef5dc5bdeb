// What the row "nccl" says where it cannot connect, and what is asked of a library before it is
// used. Needs neither a GPU nor NCCL.
#include "comm/nccl/nccl_library.h"
#include "comm/nccl/window_layout.h"

#include "conclave/comm.h"
#include "conclave/error.h"
#include "conclave/interop/nccl.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
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
    const bool has_windows = static_cast<bool>(comm::has_windows(comm::find_nccl().library));
    const char* const windows = has_windows ? "one launch an operation" : "windows";
    EXPECT_NE(row->reason.find(windows), std::string::npos) << row->reason;
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

// By the version alone, or by what of the functions is there.
TEST(NcclLibrary, Windows_NeedAWayToTheirAddresses) {
  comm::NcclLibrary library;
  library.version = 22705;
  EXPECT_NE(comm::has_windows(library).reason().find("2.28.0 is the first"), std::string::npos);
  library.version = 22809;
  library.path = "libnccl.so.2";
  EXPECT_NE(comm::has_windows(library).reason().find("lacks functions"), std::string::npos);
  library.windows.mem_alloc = [](void**, size_t) { return comm::kNcclSuccess; };
  library.windows.mem_free = [](void*) { return comm::kNcclSuccess; };
  library.windows.window_register = [](ncclComm*, void*, size_t, ncclWindow_vidmem**, int) {
    return comm::kNcclSuccess;
  };
  library.windows.window_deregister = [](ncclComm*, ncclWindow_vidmem*) {
    return comm::kNcclSuccess;
  };
  library.windows.team_lsa = [](ncclComm*) { return comm::NcclTeam{}; };
  EXPECT_TRUE(comm::has_windows(library));
  library.version = 22902;
  EXPECT_FALSE(comm::has_windows(library)) << "later ones have their addresses by a call";
  library.windows.get_peer_device_pointer = [](ncclWindow_vidmem*, size_t, int, void**) {
    return comm::kNcclSuccess;
  };
  EXPECT_TRUE(comm::has_windows(library));
}

// A flag of a stripe belongs to one block on both sides, and no slot reaches into the next.
TEST(WindowLayout, Stripes_CoverEveryLength) {
  constexpr int64_t kLimit = int64_t{8} << 20;
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{8192}, int64_t{8193},
                              int64_t{1} << 20, (int64_t{1} << 20) + 1, kLimit - 1, kLimit}) {
    const int64_t stripe = comm::stripe_bytes_of(bytes, comm::kLaneBits);
    const int32_t stripes = comm::stripes_of(bytes, comm::kLaneBits);
    EXPECT_EQ(stripe % 4096, 0) << bytes;
    EXPECT_GE(stripes, 1) << bytes;
    EXPECT_LE(stripes, comm::kMaxLanes) << bytes;
    EXPECT_GE(stripe * stripes, bytes);
    EXPECT_TRUE(stripes == 1 || stripe * (stripes - 1) < bytes) << bytes;
  }
}

TEST(WindowLayout, Slots_LieSideBySide) {
  constexpr int64_t kSlot = 4096;
  for (int32_t ranks = 2; ranks <= comm::kMaxWindowRanks; ++ranks) {
    for (int32_t receiver = 0; receiver < ranks; ++receiver) {
      std::vector<int64_t> offsets;
      for (uint32_t epoch = 5; epoch < 5 + comm::kEpochs; ++epoch) {
        for (int32_t sender = 0; sender < ranks; ++sender) {
          if (sender == receiver) continue;
          offsets.push_back(comm::slot_offset(epoch, sender, receiver, ranks, kSlot));
        }
      }
      std::sort(offsets.begin(), offsets.end());
      EXPECT_EQ(offsets.front(), comm::kWindowHeadBytes);
      for (size_t i = 1; i < offsets.size(); ++i) EXPECT_EQ(offsets[i] - offsets[i - 1], kSlot);
      EXPECT_EQ(offsets.back() + kSlot, comm::window_bytes(ranks, kSlot));
    }
  }
}

}  // namespace
}  // namespace conclave
