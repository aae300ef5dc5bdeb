// Structs of older and newer programs, last errors, and the texts of both.
#include "capi/structs.h"

#include "capi/handles.h"
#include "capi/status_rows.h"
#include "capi/wording.h"

#include "conclave/error.h"
#include "conclave/version.h"

#include <fstream>
#include <sstream>
#include <thread>

namespace conclave {
namespace {

using testing::expect_error;
using testing::last_error;
using testing::sized;

// A struct of two releases, and a program that was built for each.
struct Released {
  size_t struct_size;
  int64_t first;
  const char* second;
};
struct Later {
  Released known;
  int64_t third;
};

TEST(Structs, OlderProgram_MissingMembersAreZero) {
  const Released now{.struct_size = 16, .first = 7, .second = "memory that is not its own"};
  const Released taken = capi::take(&now, "args");
  EXPECT_EQ(taken.first, 7);
  EXPECT_EQ(taken.second, nullptr);
}

TEST(Structs, NewerProgram_ZeroTailIsTaken) {
  Later later{};
  later.known = {.struct_size = sizeof(Later), .first = 7, .second = "own"};
  EXPECT_EQ(capi::take(&later.known, "args").first, 7);
  later.third = int64_t{1} << 40;
  try {
    capi::take(&later.known, "args");
    FAIL() << "a member that means nothing was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(error.detail().found.find("offset 29"), std::string::npos) << error.what();
  }
}

TEST(Structs, ImpossibleSizes_AreRefused) {
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{7}, size_t{12}, size_t{4104}, ~size_t{0}}) {
    const Released given{.struct_size = size, .first = 0, .second = nullptr};
    EXPECT_THROW(capi::take(&given, "args"), Error) << size;
  }
}

TEST(Structs, ProgramsOfOtherReleases_FillAsMuchAsTheyHave) {
  Later later{};
  later.third = 5;
  later.known.struct_size = sizeof(Later);
  capi::fill(&later.known, {.struct_size = 0, .first = 1, .second = nullptr});
  EXPECT_EQ(later.known.struct_size, sizeof(Later));
  EXPECT_EQ(later.third, 0);
  Released older{.struct_size = 16, .first = 0, .second = "stays"};
  capi::fill(&older, {.struct_size = 0, .first = 1, .second = "new"});
  EXPECT_EQ(older.first, 1);
  EXPECT_STREQ(older.second, "stays");
}

TEST(Structs, EveryPublicStruct_TakesAnEarlierOne) {
  // As of a release that had only the first members.
  auto options = sized<conclave_context_options>();
  options.struct_size = offsetof(conclave_context_options, flags) + sizeof(uint32_t);
  options.num_threads = 1;
  options.log = reinterpret_cast<const conclave_log*>(uintptr_t{8});  // beyond what it has
  const auto context = testing::make<conclave_context>(&conclave_context_create, &options);
  const char* device = nullptr;
  ASSERT_EQ(conclave_context_device(context.get(), &device), CONCLAVE_OK);
  EXPECT_STREQ(device, "cpu");

  conclave_build build = {};
  build.struct_size = 16;
  ASSERT_EQ(conclave_get_build(&build), CONCLAVE_OK);
  EXPECT_STREQ(build.version, CONCLAVE_VERSION_STRING);
  EXPECT_EQ(build.commit, nullptr);
}

TEST(LastError, SuccessKeepsIt_AndThreadsHaveTheirOwn) {
  expect_error(conclave_context_create(nullptr, nullptr), CONCLAVE_ERROR_NULL_POINTER, "context");
  auto build = sized<conclave_build>();
  ASSERT_EQ(conclave_get_build(&build), CONCLAVE_OK);
  EXPECT_EQ(last_error().status, CONCLAVE_ERROR_NULL_POINTER);
  std::thread([] {
    EXPECT_EQ(last_error().status, CONCLAVE_OK);
    EXPECT_STREQ(conclave_last_error_message(), "");
    EXPECT_EQ(last_error().peer, -1);
  }).join();
  EXPECT_STREQ(last_error().tensor, "context");
}

TEST(LastError, OfAFile_NamesIt) {
  conclave_checkpoint* out = nullptr;
  expect_error(conclave_checkpoint_open("testdata/no-such-model", nullptr, &out),
               CONCLAVE_ERROR_FILE_NOT_FOUND, "testdata/no-such-model");
  EXPECT_NE(std::string(last_error().file).find("no-such-model"), std::string::npos);
  EXPECT_EQ(out, nullptr);
}

TEST(LastError, WrongSize_IsSaidByTheStatusAlone) {
  expect_error(conclave_context_create(nullptr, nullptr), CONCLAVE_ERROR_NULL_POINTER, "context");
  conclave_error error = {};
  error.struct_size = 3;
  EXPECT_EQ(conclave_last_error(&error), CONCLAVE_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(conclave_last_error(nullptr), CONCLAVE_ERROR_NULL_POINTER);
  EXPECT_EQ(last_error().status, CONCLAVE_ERROR_NULL_POINTER);
}

std::string text_of_file(const char* path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(Status, EveryCodeOfCpp_HasItsTwin) {
  const std::string header = text_of_file("include/conclave/error.h");
  const std::string codes = header.substr(header.find("enum class ErrorCode"));
  size_t count = 0;
  for (size_t at = 0; (at = codes.find(" = ", at)) != std::string::npos; ++at) {
    if (at > codes.find("};")) break;
    ++count;
  }
  EXPECT_EQ(count, capi::kStatusRows.size());
  for (const capi::StatusRow& row : capi::kStatusRows) {
    EXPECT_NE(to_string(row.code), "unknown");
    EXPECT_STREQ(conclave_status_name(row.status), row.name);
  }
  EXPECT_STREQ(conclave_status_name(CONCLAVE_OK), "CONCLAVE_OK");
  EXPECT_STREQ(conclave_status_name(1), "unknown");
}

TEST(Wording, EnumeratorsAreThoseOfC) {
  EXPECT_EQ(capi::in_c_words("use IdPolicy::kSkip."), "use CONCLAVE_ID_POLICY_SKIP.");
  EXPECT_EQ(capi::in_c_words("Reduce::kPartial, WeightUse::kInPlace"),
            "CONCLAVE_REDUCE_PARTIAL, CONCLAVE_WEIGHT_USE_IN_PLACE");
  EXPECT_EQ(capi::in_c_words("SharedMode::kFusedSlots: no"), "\"fused_slots\": no");
  EXPECT_EQ(capi::in_c_words("LayerOptions.max_tokens"), "conclave_layer_options.max_tokens");
  EXPECT_EQ(capi::in_c_words("a::k b:: ::kC topk"), "a::k b:: ::kC topk");
}

TEST(Dtypes, NumbersAreThoseOfCpp) {
  EXPECT_EQ(CONCLAVE_DTYPE_BOOL, static_cast<int32_t>(DType::kBool) + 1);
  EXPECT_EQ(CONCLAVE_DTYPE_I32, static_cast<int32_t>(DType::kI32) + 1);
  EXPECT_EQ(CONCLAVE_DTYPE_F16, static_cast<int32_t>(DType::kF16) + 1);
  EXPECT_EQ(CONCLAVE_DTYPE_U2, static_cast<int32_t>(DType::kU2) + 1);
  const std::pair<conclave_dtype, const char*> names[] = {
      {CONCLAVE_DTYPE_BOOL, "BOOL"},
      {CONCLAVE_DTYPE_U8, "U8"},
      {CONCLAVE_DTYPE_I8, "I8"},
      {CONCLAVE_DTYPE_U16, "U16"},
      {CONCLAVE_DTYPE_I16, "I16"},
      {CONCLAVE_DTYPE_U32, "U32"},
      {CONCLAVE_DTYPE_I32, "I32"},
      {CONCLAVE_DTYPE_U64, "U64"},
      {CONCLAVE_DTYPE_I64, "I64"},
      {CONCLAVE_DTYPE_F16, "F16"},
      {CONCLAVE_DTYPE_BF16, "BF16"},
      {CONCLAVE_DTYPE_F32, "F32"},
      {CONCLAVE_DTYPE_F64, "F64"},
      {CONCLAVE_DTYPE_C64, "C64"},
      {CONCLAVE_DTYPE_F8E4M3, "F8_E4M3"},
      {CONCLAVE_DTYPE_F8E5M2, "F8_E5M2"},
      {CONCLAVE_DTYPE_F8E8M0, "F8_E8M0"},
      {CONCLAVE_DTYPE_F8E4M3FNUZ, "F8_E4M3FNUZ"},
      {CONCLAVE_DTYPE_F8E5M2FNUZ, "F8_E5M2FNUZ"},
      {CONCLAVE_DTYPE_F4, "F4"},
      {CONCLAVE_DTYPE_F6E2M3, "F6_E2M3"},
      {CONCLAVE_DTYPE_F6E3M2, "F6_E3M2"},
      {CONCLAVE_DTYPE_I4, "I4"},
      {CONCLAVE_DTYPE_NF4, "NF4"},
      {CONCLAVE_DTYPE_BNB_FP4, "BNB_FP4"},
      {CONCLAVE_DTYPE_IQ4, "IQ4"},
      {CONCLAVE_DTYPE_U4, "U4"},
      {CONCLAVE_DTYPE_I6, "I6"},
      {CONCLAVE_DTYPE_U2, "U2"}};
  for (const auto& [dtype, name] : names) EXPECT_STREQ(conclave_dtype_name(dtype), name);
  int64_t bits = 0;
  EXPECT_EQ(conclave_dtype_bits(CONCLAVE_DTYPE_BF16, &bits), CONCLAVE_OK);
  EXPECT_EQ(bits, 16);
  for (const int32_t wrong : {0, -1, 30, 256, 257, 1 << 30}) {
    EXPECT_STREQ(conclave_dtype_name(wrong), "unknown") << wrong;
    expect_error(conclave_dtype_bits(wrong, &bits), CONCLAVE_ERROR_DTYPE, std::to_string(wrong));
  }
}

}  // namespace
}  // namespace conclave
