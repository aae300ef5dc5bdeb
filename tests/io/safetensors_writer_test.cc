#include "io/io_test_support.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <numeric>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

size_t files_in(const TemporaryDirectory& directory) {
  const std::filesystem::directory_iterator begin(directory.path());
  return static_cast<size_t>(std::distance(begin, {}));
}

// A rename would take the place of a device as well; that of a link is the link's own.
TEST(SafetensorsWriter, NamesOfWhatIsNoFile_AreRefused_AndStay) {
  const TemporaryDirectory directory;
  const auto pipe = directory.path() / "pipe";
  const auto folder = directory.path() / "folder";
  const auto link = directory.path() / "link";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  std::filesystem::create_directory(folder);
  std::filesystem::create_symlink(pipe, link);
  const auto write = [](const std::filesystem::path& path) {
    SafetensorsWriter writer(path, {});
    writer.declare("one", DType::kU8, {0});
    writer.finish();
  };
  for (const auto& path : {pipe, folder}) {
    try {
      write(path);
      ADD_FAILURE() << path << " was written";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFileWrite) << error.what();
      EXPECT_EQ(error.detail().file, path.string());
    }
  }
  write(link);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_TRUE(std::filesystem::is_directory(folder));
  EXPECT_TRUE(std::filesystem::is_regular_file(std::filesystem::symlink_status(link)));
  EXPECT_EQ(files_in(directory), 3U);
}

TEST(SafetensorsWriter, RoundTrip_AllDtypesNamesAndMetadata) {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "out.safetensors";
  const std::map<std::string, std::string> metadata = {
      {"quote\"back\\slash", "line\nbreak\ttab\x01 \xE2\x82\xAC"}, {"", ""}};
  const std::vector<DType> dtypes = {
      DType::kBool,   DType::kU8,     DType::kI8,         DType::kU16,        DType::kI16,
      DType::kU32,    DType::kI32,    DType::kU64,        DType::kI64,        DType::kF16,
      DType::kBF16,   DType::kF32,    DType::kF64,        DType::kC64,        DType::kF8E4M3,
      DType::kF8E5M2, DType::kF8E8M0, DType::kF8E4M3Fnuz, DType::kF8E5M2Fnuz, DType::kF4,
      DType::kF6E2M3, DType::kF6E3M2};
  std::string data;
  {
    SafetensorsWriter writer(path, metadata);
    for (const DType dtype : dtypes) {
      writer.declare("weight \"" + std::string(to_string(dtype)) + "\\\xC3\xA4", dtype, {2, 4});
      data.resize(data.size() + static_cast<size_t>(bit_size(dtype)));
    }
    writer.declare("empty", DType::kF32, {0, 3});
    writer.declare("scalar", DType::kF32, {});
    data.resize(data.size() + 4);
    std::iota(data.begin(), data.end(), '\0');
    // The pieces do not respect tensor borders.
    for (size_t at = 0; at < data.size(); at += 7) {
      writer.write(bytes_of(std::string_view(data).substr(at, 7)));
    }
    writer.finish();
  }
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.tensors().size(), dtypes.size() + 2);
  size_t at = 0;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const TensorInfo& tensor = file.tensors()[i];
    EXPECT_EQ(tensor.dtype, dtypes[i]);
    EXPECT_EQ(tensor.shape, (std::vector<int64_t>{2, 4}));
    std::string bytes(tensor.bytes, '\0');
    file.read(tensor, 0, std::as_writable_bytes(std::span(bytes)));
    EXPECT_EQ(bytes, data.substr(at, bytes.size())) << tensor.name;
    at += bytes.size();
  }
  EXPECT_EQ(file.tensors()[0].file_offset % 8, 0U);
  EXPECT_EQ(files_in(directory), 1U);
}

TEST(SafetensorsWriter, NothingDeclared_IsAnEmptyFile) {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "empty.safetensors";
  SafetensorsWriter writer(path);
  writer.finish();
  EXPECT_EQ(SafetensorsFile::open(path).tensors().size(), 0U);
}

TEST(SafetensorsWriter, Unfinished_LeavesNothingBehind) {
  const TemporaryDirectory directory;
  const auto path = directory.write("model.safetensors", "previous");
  {
    SafetensorsWriter writer(path);
    writer.declare("a", DType::kU8, {4});
    writer.write(bytes_of("ab"));
    EXPECT_EQ(name_of(code_of([&] { writer.finish(); })), "kState");
    EXPECT_EQ(read_file(path), "previous");
    EXPECT_EQ(files_in(directory), 2U);
  }
  EXPECT_EQ(read_file(path), "previous");
  EXPECT_EQ(files_in(directory), 1U);
}

TEST(SafetensorsWriter, Misuse_Refused) {
  const TemporaryDirectory directory;
  SafetensorsWriter writer(directory.path() / "model.safetensors");
  const auto declare = [&](std::string name, std::vector<int64_t> shape, DType dtype) {
    return name_of(code_of([&] { writer.declare(name, dtype, shape); }));
  };
  EXPECT_EQ(declare("a", {4}, DType::kU8), "no error");
  EXPECT_EQ(declare("a", {4}, DType::kU8), "kSafetensorsDuplicateKey");
  EXPECT_EQ(declare("__metadata__", {4}, DType::kU8), "kSafetensorsDuplicateKey");
  EXPECT_EQ(declare("a\n", {4}, DType::kU8), "kSafetensorsName");
  EXPECT_EQ(declare(std::string(4097, 'a'), {4}, DType::kU8), "kSafetensorsName");
  EXPECT_EQ(declare("\xFF", {4}, DType::kU8), "kSafetensorsUtf8");
  EXPECT_EQ(declare("b", {-1}, DType::kU8), "kSafetensorsShape");
  EXPECT_EQ(declare("b", std::vector<int64_t>(65, 1), DType::kU8), "kSafetensorsShape");
  EXPECT_EQ(declare("b", {int64_t{1} << 32, int64_t{1} << 32}, DType::kU8),
            "kSafetensorsSizeOverflow");
  EXPECT_EQ(declare("b", {3}, DType::kF4), "kSafetensorsSubByte");
  for (const DType own : {DType::kI4, DType::kNF4, DType::kBnbFP4, static_cast<DType>(200)}) {
    EXPECT_EQ(declare("b", {4}, own), "kSafetensorsDType");
  }
  EXPECT_EQ(declare("b", {int64_t{1} << 59, 2}, DType::kU8), "kSafetensorsSizeOverflow");
  EXPECT_EQ(name_of(code_of([&] { writer.write(bytes_of("12345")); })), "kInvalidArgument");
  writer.write(bytes_of("123"));
  EXPECT_EQ(declare("late", {1}, DType::kU8), "kState");
  EXPECT_EQ(name_of(code_of([&] { writer.write(bytes_of("45")); })), "kInvalidArgument");
  writer.write(bytes_of("4"));
  writer.finish();
  EXPECT_EQ(name_of(code_of([&] { writer.finish(); })), "kState");
  EXPECT_EQ(name_of(code_of([&] { writer.write({}); })), "kState");
}

TEST(SafetensorsWriter, SumOfSizesBeyond64Bits_Refused) {
  const TemporaryDirectory directory;
  SafetensorsWriter writer(directory.path() / "model.safetensors");
  std::optional<ErrorCode> code;
  for (int i = 0; i < 10 && !code; ++i) {
    code =
        code_of([&] { writer.declare(std::to_string(i), DType::kU8, {(int64_t{1} << 60) - 1}); });
  }
  EXPECT_EQ(name_of(code), "kSafetensorsSizeOverflow");
}

TEST(SafetensorsWriter, BadPlaces_WriteError) {
  const TemporaryDirectory directory;
  const NamedTensor nothing = {.name = "a", .tensor = {.data = nullptr, .shape = Shape{0}}};
  for (const auto& path : {directory.path() / "absent" / "a.safetensors",
                           directory.write("file", "") / "a.safetensors"}) {
    std::string what;
    EXPECT_EQ(name_of(code_of([&] { save_safetensors(path, std::span(&nothing, 1)); }, &what)),
              "kFileWrite");
    EXPECT_NE(what.find("a.safetensors"), std::string::npos) << what;
  }
  std::filesystem::create_directory(directory.path() / "taken.safetensors");
  EXPECT_EQ(name_of(code_of([&] {
              save_safetensors(directory.path() / "taken.safetensors", std::span(&nothing, 1));
            })),
            "kFileWrite");
  EXPECT_EQ(files_in(directory), 2U);
}

// The system refuses bytes midway, as on a full disk.
TEST(SafetensorsWriter, NoRoom_WriteErrorAndNothingLeft) {
  const TemporaryDirectory directory;
  const auto previous = signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  getrlimit(RLIMIT_FSIZE, &old_limit);
  const rlimit limit = {.rlim_cur = 10'000, .rlim_max = old_limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  const std::string data(20'000, 'x');
  const NamedTensor tensor = {
      .name = "a", .tensor = {.data = data.data(), .dtype = DType::kU8, .shape = Shape{20'000}}};
  std::string what;
  const auto code = code_of(
      [&] { save_safetensors(directory.path() / "model.safetensors", std::span(&tensor, 1)); },
      &what);
  setrlimit(RLIMIT_FSIZE, &old_limit);
  signal(SIGXFSZ, previous);
  EXPECT_EQ(name_of(code), "kFileWrite") << what;
  EXPECT_EQ(files_in(directory), 0U);
}

TEST(SaveSafetensors, StridedRowsAndMixedDtypes_AlignedAndDense) {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "model.safetensors";
  const std::array<uint8_t, 3> bytes = {1, 2, 3};
  std::array<float, 12> rows;
  std::iota(rows.begin(), rows.end(), 0.0f);
  const std::vector<NamedTensor> tensors = {
      {"bytes", {.data = bytes.data(), .dtype = DType::kU8, .shape = Shape{3}}},
      {"rows", {.data = rows.data(), .dtype = DType::kF32, .shape = Shape{3, 2}, .row_stride = 4}},
  };
  save_safetensors(path, tensors, {{"format", "pt"}});
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.find("rows")->file_offset % 4, 0U);
  const Tensor dense = file.load("rows");
  const std::vector<float> expected = {0, 1, 4, 5, 8, 9};
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), dense.as<float>()));
  EXPECT_EQ(file.load("bytes").as<uint8_t>()[2], 3);
}

TEST(SaveSafetensors, BadViews_Refused) {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "model.safetensors";
  const std::array<float, 4> data = {};
  const auto save = [&](ConstTensorView view) {
    const NamedTensor tensor = {"a", view};
    return name_of(code_of([&] { save_safetensors(path, std::span(&tensor, 1)); }));
  };
  EXPECT_EQ(save({.data = nullptr, .shape = Shape{4}}), "kNullPointer");
  EXPECT_EQ(save({.data = data.data(), .shape = Shape{2, 2}, .row_stride = 1}), "kStride");
  EXPECT_EQ(save({.data = data.data(), .dtype = DType::kF4, .shape = Shape{2, 2}, .row_stride = 4}),
            "kStride");
  EXPECT_EQ(files_in(directory), 0U);
}

}  // namespace
}  // namespace conclave::testing
