// Bars S3 and S6: sizes that fit nowhere, and the time and memory that large headers take.
#include "io/io_test_support.h"
#include "io/json.h"
#include "io/measure.h"

#include "conclave/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

namespace conclave::testing {
namespace {

std::vector<TensorInfo> parse(std::string_view start, uint64_t file_bytes) {
  return SafetensorsFile::parse_header(bytes_of(start), file_bytes, "model.safetensors");
}

TEST(SafetensorsSizes, NoAddressSpaceHoldsThem_Overflow) {
  std::mt19937_64 random(20240607);
  const std::array<std::string_view, 6> dtypes = {"U8", "BF16", "F32", "F64", "F4", "F6_E2M3"};
  const size_t trials = 20'000 / kShare;
  size_t accepted = 0;
  size_t large_messages = 0;
  const size_t growth = peak_growth([&] {
    for (size_t trial = 0; trial < trials; ++trial) {
      // The product of the dimensions is at least 2^64 bits, now and then hidden behind a zero.
      std::string shape;
      int log2_product = 0;
      while (log2_product < 64) {
        const int log2_dim = static_cast<int>(random() % 62) + 1;
        log2_product += log2_dim;
        shape += fmt::format("{}{}", shape.empty() ? "" : ",",
                             (uint64_t{1} << log2_dim) + random() % (uint64_t{1} << log2_dim));
      }
      if (trial % 5 == 0) shape = "0," + shape;
      if (trial % 5 == 1) shape += ",0";
      const std::string file =
          safetensors(fmt::format("{{{}}}", entry("a", dtypes[trial % dtypes.size()],
                                                  fmt::format("[{}]", shape), "[0,4]")),
                      4);
      std::string what;
      const auto code = code_of([&] { parse(file, file.size()); }, &what);
      EXPECT_EQ(name_of(code), "kSafetensorsSizeOverflow") << file;
      if (!code) ++accepted;
      if (what.size() > 1024) ++large_messages;
    }
  });
  EXPECT_EQ(large_messages, 0U);
  if (!kIsInstrumented) {
    EXPECT_LE(growth, 4 * kMebibyte);
  }
  fmt::print("S3: {} overflowing sizes, accepted {}, peak RSS grew by {} KiB\n", trials, accepted,
             growth / 1024);
}

TEST(SafetensorsSizes, OffsetSumsBeyond64Bits_Refused) {
  for (const std::string_view offsets :
       {"[18446744073709551615,18446744073709551615]", "[0,18446744073709551615]",
        "[9223372036854775807,9223372036854775807]", "[1,0]"}) {
    const std::string file = safetensors(fmt::format("{{{}}}", entry("a", "U8", "[0]", offsets)));
    EXPECT_EQ(name_of(code_of([&] { parse(file, file.size()); })), "kSafetensorsOffsets");
  }
}

TEST(SafetensorsSizes, ClaimsWithoutBytes_RefusedBeforeAllocation) {
  const std::string tail(32, ' ');
  const std::vector<std::string> files = {
      length_prefix(uint64_t{1} << 30) + tail,  // a header of 1 GiB
      length_prefix(100'000'000) + tail,        // the largest legal one
      length_prefix(~uint64_t{0}) + tail,
      safetensors(fmt::format(
          "{{{}}}", entry("a", "U8", "[2305843009213693951]", "[0,2305843009213693951]"))),
  };
  const TemporaryDirectory directory;
  const size_t growth = peak_growth([&] {
    for (const std::string& file : files) {
      const auto path = directory.write("claim.safetensors", file);
      EXPECT_NE(code_of([&] { SafetensorsFile::open(path); }), std::nullopt);
    }
  });
  if (!kIsInstrumented) {
    EXPECT_LE(growth, kMebibyte);
  }
  fmt::print("S6: empty claims, peak RSS grew by {} KiB\n", growth / 1024);
}

TEST(SafetensorsComplexity, HundredThousandTensors_LinearTimeAndMemory) {
  const size_t count = 200'000 / kShare;
  const std::string small = safetensors(large_header(count / 2));
  const std::string large = safetensors(large_header(count));
  const double small_ms = best_milliseconds([&] { parse(small, small.size() + 2 * count); });
  const double large_ms = best_milliseconds([&] { parse(large, large.size() + 4 * count); });
  size_t tensors = 0;
  const size_t growth =
      peak_growth([&] { tensors = parse(large, large.size() + 4 * count).size(); });
  EXPECT_EQ(tensors, count);
  // The file's own bytes count too, because open() reads the header into memory.
  const double factor = 1 + static_cast<double>(growth) / static_cast<double>(large.size());
  fmt::print("S6: safetensors {} tensors {:.1f} ms, {} {:.1f} ms, ratio {:.2f}, RSS {:.1f}x\n",
             count / 2, small_ms, count, large_ms, large_ms / small_ms, factor);
  if (kIsInstrumented) return;
  EXPECT_LE(small_ms, kMaxMillisecondsOf100k);
  EXPECT_LE(large_ms / small_ms, kMaxGrowth);
  EXPECT_LE(factor, kMaxResidentFactor);
}

TEST(SafetensorsComplexity, ShuffledAndEscapedNames_NoSlower) {
  std::vector<size_t> order(100'000 / kShare);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::shuffle(order, std::mt19937(7));
  std::string header = "{";
  for (const size_t i : order) {
    if (header.size() > 1) header += ',';
    header += entry(fmt::format("\\u006dodel.experts.{}.weight", i), "BF16", "[2,1]",
                    fmt::format("[{},{}]", 4 * i, 4 * i + 4));
  }
  const std::string file = safetensors(header + "}");
  const double ms = best_milliseconds([&] { parse(file, file.size() + 4 * order.size()); });
  fmt::print("S6: safetensors {} tensors out of order, escaped: {:.1f} ms\n", order.size(), ms);
  if (!kIsInstrumented) {
    EXPECT_LE(ms, kMaxMillisecondsOf100k);
  }
}

TEST(SafetensorsComplexity, LargestHeader_BoundedTimeAndMemory) {
  // These are 99.9 MB of the densest content a header may have, each legal or refused, never slow.
  const size_t bytes = 99'900'000 / kShare;
  std::string spaces = "{" + std::string(bytes - 2, ' ') + "}";
  std::string digits = R"({"a":{"dtype":"U8","shape":[)" + std::string(bytes - 64, '1');
  std::string ones = R"({"a":{"dtype":"U8","shape":[1)";
  while (ones.size() < bytes) ones += ",1";
  std::string brackets = R"({"a":)" + std::string(bytes - 8, '[');
  std::string tensors = large_header(bytes / 128);
  tensors.insert(tensors.size() - 1, bytes - tensors.size(), ' ');
  for (std::string* header : {&tensors, &spaces, &digits, &ones, &brackets}) {
    const std::string file = safetensors(*header);
    *header = {};
    const double begin = cpu_milliseconds();
    const size_t growth = peak_growth([&] { code_of([&] { parse(file, file.size()); }); });
    const double taken = cpu_milliseconds() - begin;
    fmt::print("S6: {} bytes of header {:.16}...: {:.1f} ms, peak RSS grew by {} KiB\n", bytes,
               file.substr(8, 16), taken, growth / 1024);
    if (!kIsInstrumented) {
      EXPECT_LE(taken, 4000);
      EXPECT_LE(growth, 7 * file.size());
    }
  }
}

// Returns a text with the layout of model.safetensors.index.json.
std::string large_index(size_t count) {
  std::string text = R"({"metadata":{"total_size":1},"weight_map":{)";
  for (size_t i = 0; i < count; ++i) {
    text += fmt::format(
        R"({}"model.layers.{}.mlp.experts.{}.down_proj.weight":"model-{:05}.safetensors")",
        i == 0 ? "" : ",", i / 128, i % 128, i / 1000);
  }
  return text + "}}";
}

TEST(JsonComplexity, HundredThousandIndexEntries_LinearTimeAndMemory) {
  const size_t count = 200'000 / kShare;
  const std::string small = large_index(count / 2);
  const std::string large = large_index(count);
  const auto parse_index = [](const std::string& text) {
    return io::JsonDocument::parse(text, "index.json", io::kIndexLimits)
        .root()
        .at("weight_map")
        .size();
  };
  const double small_ms = best_milliseconds([&] { parse_index(small); });
  const double large_ms = best_milliseconds([&] { parse_index(large); });
  size_t entries = 0;
  const size_t growth = peak_growth([&] { entries = parse_index(large); });
  EXPECT_EQ(entries, count);
  const double factor = 1 + static_cast<double>(growth) / static_cast<double>(large.size());
  fmt::print("S6: index {} entries {:.1f} ms, {} {:.1f} ms, ratio {:.2f}, RSS {:.1f}x\n", count / 2,
             small_ms, count, large_ms, large_ms / small_ms, factor);
  if (kIsInstrumented) return;
  EXPECT_LE(small_ms, kMaxMillisecondsOf100k);
  EXPECT_LE(large_ms / small_ms, kMaxGrowth);
  EXPECT_LE(factor, kMaxResidentFactor);
}

}  // namespace
}  // namespace conclave::testing
