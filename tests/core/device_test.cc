// Names of devices: those that there are, and what is none.
#include "core/device.h"

#include "conclave/error.h"

#include <gtest/gtest.h>

namespace conclave::testing {
namespace {

TEST(Device, Names_ReadBack) {
  for (const char* name : {"cpu", "cuda:0", "cuda:17"}) {
    EXPECT_EQ(to_string(parse_device(name)), name);
  }
  EXPECT_EQ(to_string(parse_device("")), "cpu");
  EXPECT_EQ(to_string(parse_device("cuda")), "cuda:0");
}

TEST(Device, OtherNames_AreRefused) {
  for (const char* name :
       {"CPU", "cuda0", "cuda:", "cuda:-1", "cuda:0x", "cuda:1 ", "cuda:1,2", "cuda:4294967296"}) {
    EXPECT_THROW(parse_device(name), Error) << name;
  }
}

}  // namespace
}  // namespace conclave::testing
