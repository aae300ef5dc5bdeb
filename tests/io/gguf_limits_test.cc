// Bars S3 and S6 for GGUF: sizes that fit nowhere, and the time and memory that large headers take.
#include "io/gguf/file.h"
#include "io/gguf/types.h"
#include "io/gguf_bytes.h"
#include "io/io_test_support.h"
#include "io/measure.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

TEST(GgufSizes, NoAddressSpaceHoldsThem_Overflow) {
  std::mt19937_64 random(20240607);
  const std::vector<uint32_t> types = {kTypeI8, kTypeF16, kTypeF64, kTypeQ8_0, kTypeQ2K, kTypeQ4K};
  const size_t trials = 20'000 / kShare;
  size_t accepted = 0;
  const size_t growth = peak_growth([&] {
    for (size_t trial = 0; trial < trials; ++trial) {
      const uint32_t type = types[trial % types.size()];
      // The product of the dimensions is at least 2^64.
      std::vector<uint64_t> dims;
      int log2_product = 0;
      while (log2_product < 64) {
        const int most = dims.size() == 3 ? 62 : std::min(62, 24 + log2_product);
        const int least = dims.size() == 3 ? 64 - log2_product : 10;
        const int log2_dim = std::uniform_int_distribution(least, most)(random);
        log2_product += log2_dim;
        const uint64_t dim = (uint64_t{1} << log2_dim) + random() % (uint64_t{1} << log2_dim);
        dims.push_back(dims.empty() ? dim / 256 * 256 : dim);
      }
      const std::string file =
          gguf({.tensors = {gguf_tensor("a", dims, type, 0)}, .data_bytes = 32});
      const auto code = code_of([&] { parse_gguf(file); });
      EXPECT_EQ(name_of(code), "kGgufSizeOverflow") << fmt::format("{}", fmt::join(dims, " "));
      if (!code) ++accepted;
    }
  });
  if (!kIsInstrumented) {
    EXPECT_LE(growth, 4 * kMebibyte);
  }
  fmt::print("S3: {} overflowing sizes, accepted {}, peak RSS grew by {} KiB\n", trials, accepted,
             growth / 1024);
}

TEST(GgufSizes, ClaimsWithoutBytes_RefusedBeforeAllocation) {
  constexpr uint64_t kGibibyte = uint64_t{1} << 30;
  const std::string room(32, ' ');
  const auto entry_of = [&](uint32_t type, std::string_view value) {
    return gguf({.entries = {gguf_entry("k", type, value)}, .data_bytes = 32});
  };
  const std::vector<std::string> files = {
      gguf_header({.num_entries = 0, .num_tensors = uint64_t{1} << 61}),
      gguf_header({.num_entries = uint64_t{1} << 61}) + room,
      gguf_header({.num_entries = 262'144}) + room,
      gguf_header({.num_tensors = 1'000'000}) + room,
      gguf({.entries = {little_endian(kGibibyte) + room}}),
      entry_of(kGgufText, little_endian(kGibibyte) + room),
      entry_of(kGgufText, little_endian(uint64_t{16} << 20) + room),
      entry_of(kGgufList, gguf_array(kGgufText, kGibibyte, room)),
      entry_of(kGgufList, gguf_array(kGgufU8, 65'536, room)),
      entry_of(kGgufList, gguf_array(kGgufF64, kGibibyte, room)),
      entry_of(kGgufList, gguf_array(kGgufText, 1, little_endian(kGibibyte) + room)),
      gguf({.tensors = {little_endian(kGibibyte) + room}}),
      gguf({.tensors = {gguf_text("a") + little_endian(1U << 30) + room}}),
      gguf({.tensors = {gguf_tensor("a", {uint64_t{1} << 60}, kTypeF32, 0)}, .data_bytes = 32}),
      gguf({.entries = {gguf_entry("split.count", kGgufU64, uint64_t{1} << 61)}}),
  };
  const TemporaryDirectory directory;
  const size_t growth = peak_growth([&] {
    for (const std::string& file : files) {
      const auto path = directory.write("claim.gguf", file);
      EXPECT_NE(code_of([&] { io::GgufFile::open(path); }), std::nullopt);
    }
  });
  if (!kIsInstrumented) {
    EXPECT_LE(growth, kMebibyte);
  }
  fmt::print("S6: {} empty claims, peak RSS grew by {} KiB\n", files.size(), growth / 1024);
}

// Time and memory for the header, which is read from a file piece by piece.
void expect_linear(const char* what, const GgufParts& small_parts, const GgufParts& large_parts) {
  const TemporaryDirectory directory;
  const auto small = io::File::open(directory.write("small.gguf", gguf(small_parts)));
  const auto large = io::File::open(directory.write("large.gguf", gguf(large_parts)));
  const double header_bytes = static_cast<double>(gguf_header(large_parts).size());
  const double small_ms = best_milliseconds([&] { io::read_gguf_header(small); });
  const double large_ms = best_milliseconds([&] { io::read_gguf_header(large); });
  size_t things = 0;
  const size_t growth = peak_growth([&] {
    const io::GgufHeader header = io::read_gguf_header(large);
    things = header.entries.size() + header.tensors.size();
  });
  EXPECT_EQ(things, large_parts.entries.size() + large_parts.tensors.size());
  const double factor = static_cast<double>(growth) / header_bytes;
  fmt::print("S6: GGUF {} {} {:.1f} ms, twice as many {:.1f} ms, ratio {:.2f}, RSS {:.1f}x\n",
             things / 2, what, small_ms, large_ms, large_ms / small_ms, factor);
  if (kIsInstrumented) return;
  EXPECT_LE(small_ms, kMaxMillisecondsOf100k);
  EXPECT_LE(large_ms / small_ms, kMaxGrowth);
  EXPECT_LE(factor, kMaxResidentFactor);
}

TEST(GgufComplexity, HundredThousandTensors_LinearTimeAndMemory) {
  expect_linear("tensors", large_gguf(100'000 / kShare), large_gguf(200'000 / kShare));
}

TEST(GgufComplexity, HundredThousandKeys_LinearTimeAndMemory) {
  expect_linear("keys", large_gguf(0, 100'000 / kShare), large_gguf(0, 200'000 / kShare));
}

// The shortest entries and tensors take the most memory for their bytes.
TEST(GgufComplexity, ShortestEntries_BoundedTimeAndMemory) {
  GgufParts parts;
  for (size_t i = 0; i < 200'000 / kShare; ++i) {
    const std::string name = fmt::format("{:x}", i);
    parts.entries.push_back(gguf_entry(name, kGgufList, gguf_array(kGgufU8, 1, "x")));
    parts.tensors.push_back(gguf_tensor(name, {}, kTypeI8, 32 * i));
  }
  const std::string header = gguf_header(parts);
  const uint64_t file_bytes = header.size() + 32 * parts.tensors.size();
  const auto parse = [&] {
    return io::parse_gguf_header(reader_of(header), file_bytes, "model.gguf").tensors.size();
  };
  const double ms = best_milliseconds(parse);
  size_t tensors = 0;
  const size_t growth = peak_growth([&] { tensors = parse(); });
  EXPECT_EQ(tensors, parts.tensors.size());
  const double factor = static_cast<double>(growth) / static_cast<double>(header.size());
  fmt::print("S6: GGUF {} short keys and as many short tensors {:.1f} ms, RSS {:.1f}x\n", tensors,
             ms, factor);
  if (kIsInstrumented) return;
  EXPECT_LE(ms, 4 * kMaxMillisecondsOf100k);
  EXPECT_LE(factor, kMaxResidentFactor);
}

// The densest content that headers of tens of megabytes may have, each legal or refused, never
// slow.
TEST(GgufComplexity, LargeValues_BoundedTimeAndMemory) {
  constexpr size_t kBytes = (48 / kShare) << 20;
  GgufParts arrays;
  for (size_t i = 0; i < kBytes / 65'536; ++i) {
    arrays.entries.push_back(gguf_entry(fmt::format("{}", i), kGgufList,
                                        gguf_array(kGgufU8, 65'536, std::string(65'536, 'x'))));
  }
  GgufParts strings;
  for (size_t i = 0; i < 3; ++i) {
    strings.entries.push_back(
        gguf_entry(fmt::format("{}", i), kGgufText, gguf_text(std::string(kBytes / 3, 'x'))));
  }
  const GgufParts words = {
      .entries = {gguf_entry("k", kGgufList,
                             gguf_array(kGgufText, kBytes / 8, std::string(kBytes, '\0')))}};
  const GgufParts skipped = {
      .entries = {
          gguf_entry("k", kGgufList, gguf_array(kGgufU8, kBytes, std::string(kBytes, 'x')))}};
  const std::vector<std::pair<const char*, const GgufParts*>> cases = {{"arrays of bytes", &arrays},
                                                                       {"strings", &strings},
                                                                       {"words", &words},
                                                                       {"one array", &skipped}};
  for (const auto& [name, parts] : cases) {
    const std::string file = gguf(*parts);
    const double begin = cpu_milliseconds();
    const size_t growth = peak_growth([&] { parse_gguf(file); });
    const double taken = cpu_milliseconds() - begin;
    const double factor = static_cast<double>(growth) / static_cast<double>(file.size());
    fmt::print("S6: GGUF header of {} bytes of {}: {:.1f} ms, RSS {:.1f}x\n", kBytes, name, taken,
               factor);
    if (!kIsInstrumented) {
      EXPECT_LE(taken, 2000);
      // Each byte of an array becomes a number of eight.
      EXPECT_LE(factor, kMaxResidentFactor + 1);
    }
  }
}

}  // namespace
}  // namespace conclave::testing
