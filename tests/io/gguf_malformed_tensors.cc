#include "io/gguf/types.h"
#include "io/gguf_bytes.h"
#include "io/gguf_malformed.h"

#include <fmt/format.h>

namespace conclave::testing {
namespace {

using enum ErrorCode;
constexpr uint64_t kGibibyte = uint64_t{1} << 30;
constexpr uint64_t kMost = ~uint64_t{0};

// One tensor, with 32 bytes of data.
MalformedGguf tensor_case(std::string name, std::string tensor, ErrorCode code) {
  return {std::move(name), gguf({.tensors = {std::move(tensor)}, .data_bytes = 32}), code};
}

MalformedGguf dims_case(std::string name, uint32_t type, const std::vector<uint64_t>& dims,
                        ErrorCode code) {
  return tensor_case(std::move(name), gguf_tensor("a", dims, type, 0), code);
}

// Two tensors of one F32 each, at 0 and at 32 unless said otherwise.
std::string two_tensors(uint64_t first_offset, uint64_t second_offset,
                        std::string_view second = "b", size_t data_bytes = 64) {
  return gguf({.tensors = {gguf_tensor("a", {1}, kTypeF32, first_offset),
                           gguf_tensor(second, {1}, kTypeF32, second_offset)},
               .data_bytes = data_bytes});
}

std::string one_tensor(size_t data_bytes) {
  return gguf({.tensors = {gguf_tensor("a", {4}, kTypeF32, 0)}, .data_bytes = data_bytes});
}

void add_twin_cases(GgufCases& cases) {
  cases.push_back({"tensor_twice", two_tensors(0, 32, "a"), kGgufDuplicateTensor});
  cases.push_back({"tensor_twice_in_one_place", two_tensors(0, 0, "a"), kGgufDuplicateTensor});
  cases.push_back(
      {"tensor_twice_among_others",
       gguf({.tensors = {gguf_tensor("x", {1}, kTypeF32, 0), gguf_tensor("a", {1}, kTypeF32, 32),
                         gguf_tensor("y", {1}, kTypeF32, 64), gguf_tensor("a", {2}, kTypeF16, 96)},
             .data_bytes = 128}),
       kGgufDuplicateTensor});
}

void add_name_length_cases(GgufCases& cases) {
  for (const uint64_t bytes :
       {uint64_t{65}, kGibibyte, uint64_t{1} << 61, uint64_t{1} << 63, kMost - 7, kMost}) {
    cases.push_back(tensor_case(fmt::format("name_of_{}", bytes),
                                little_endian(bytes) + std::string(64, 'x'), kGgufString));
  }
  cases.push_back(tensor_case("name_65_bytes", gguf_tensor(std::string(65, 'n'), {1}, kTypeF32, 0),
                              kGgufString));
}

void add_tensor_cases(GgufCases& cases) {
  for (const auto& [name, text] : gguf_bad_texts()) {
    cases.push_back(tensor_case("name_" + name, gguf_tensor(text, {1}, kTypeF32, 0), kGgufName));
  }
  for (const uint32_t rank : {5U, 64U, 0x4000'0000U, 0x8000'0000U, ~0U}) {
    cases.push_back(tensor_case(fmt::format("rank_{}", rank),
                                gguf_text("a") + little_endian(rank) + std::string(64, '\1'),
                                kGgufShape));
  }
  cases.push_back(dims_case("dim_0", kTypeF32, {0}, kGgufShape));
  cases.push_back(dims_case("dim_0_of_blocks", kTypeQ4K, {0, 4}, kGgufShape));
  cases.push_back(dims_case("last_dim_0", kTypeF32, {4, 1, 1, 0}, kGgufShape));
  cases.push_back(dims_case("dim_0_hides_an_overflow", kTypeF32,
                            {uint64_t{1} << 62, 0, uint64_t{1} << 62}, kGgufShape));
  for (const uint32_t type :
       {4U, 5U, 9U, 31U, 32U, 33U, 36U, 37U, 38U, 43U, 44U, 255U, 0x8000'0000U, ~0U}) {
    cases.push_back(dims_case(fmt::format("type_{}", type), type, {256}, kGgufTensorType));
  }
  for (uint32_t id = 0; id < 64; ++id) {
    const io::GgufType* type = io::find_gguf_type(id);
    if (type == nullptr || type->block_elements == 1) continue;
    const uint64_t block = type->block_elements;
    for (const uint64_t row : {uint64_t{1}, block - 1, block + 1, block + block / 2}) {
      cases.push_back(
          dims_case(fmt::format("row_{}_of_{}", row, type->name), id, {row}, kGgufShape));
    }
    // The elements fill blocks, but no row does.
    cases.push_back(dims_case(fmt::format("rows_share_blocks_of_{}", type->name), id,
                              {block / 2, 2}, kGgufShape));
    cases.push_back(dims_case(fmt::format("number_of_{}", type->name), id, {}, kGgufShape));
  }
}

void add_size_cases(GgufCases& cases) {
  const auto overflow = [&](std::string name, uint32_t type, const std::vector<uint64_t>& dims) {
    cases.push_back(dims_case("overflow_" + name, type, dims, kGgufSizeOverflow));
  };
  overflow("2_63", kTypeI8, {uint64_t{1} << 63});
  overflow("minus_1", kTypeF32, {kMost});
  overflow("last_dim_minus_1", kTypeF32, {1, 1, 1, kMost});
  overflow("minus_1_squared", kTypeI8, {kMost, kMost});
  overflow("product_2_64", kTypeI8, {uint64_t{1} << 32, uint64_t{1} << 32});
  overflow("product_2_63", kTypeI8, {uint64_t{1} << 32, uint64_t{1} << 31});
  overflow("product_2_128", kTypeI8,
           {uint64_t{1} << 32, uint64_t{1} << 32, uint64_t{1} << 32, uint64_t{1} << 32});
  overflow("product_wraps_to_1", kTypeI8, {7, 0x6DB6'DB6D'B6DB'6DB7});
  overflow("product_wraps_to_32_bytes", kTypeF64, {4, (uint64_t{1} << 61) + 1});
  overflow("bytes_2_63", kTypeF64, {uint64_t{1} << 60});
  overflow("bytes_2_64", kTypeF32, {uint64_t{1} << 62});
  overflow("blocks", kTypeQ4K, {256, uint64_t{1} << 62});
  // The bytes would fit.
  overflow("elements", kTypeQ2K, {uint64_t{1} << 62, 2, 2});
}

void add_layout_cases(GgufCases& cases) {
  const auto offset = [&](std::string name, std::string file) {
    cases.push_back({"offset_" + name, std::move(file), kGgufOffset});
  };
  offset("misaligned", two_tensors(1, 32));
  offset("first_late", two_tensors(32, 64));
  offset("second_unpadded", two_tensors(0, 4));
  offset("second_late", two_tensors(0, 64, "b", 96));
  offset("overlap", two_tensors(0, 0));
  offset("swapped", two_tensors(32, 0));
  offset("2_63", two_tensors(0, uint64_t{1} << 63));
  offset("minus_32", two_tensors(0, kMost - 31));
  offset("minus_1", two_tensors(kMost, 32));
  offset("wraps_to_the_start_of_the_file", two_tensors(kMost - 127, 32));
  offset("of_another_alignment",
         gguf({.entries = {gguf_entry("general.alignment", kGgufU32, 64U)},
               .tensors = {gguf_tensor("a", {1}, kTypeF32, 0), gguf_tensor("b", {1}, kTypeF32, 32)},
               .data_bytes = 128,
               .alignment = 64}));

  const auto truncated = [&](std::string name, std::string file) {
    cases.push_back({"data_" + name, std::move(file), kGgufTruncatedData});
  };
  truncated("missing", one_tensor(0));
  truncated("missing_with_its_padding",
            gguf_header({.tensors = {gguf_tensor("a", {4}, kTypeF32, 0)}}));
  truncated("one_short", one_tensor(15));
  truncated("second_missing", two_tensors(0, 32, "b", 32));
  truncated("second_one_short", two_tensors(0, 32, "b", 35));
  truncated("cut_in_the_padding_between", two_tensors(0, 32, "b", 20));
  cases.push_back(dims_case("data_of_exabytes", kTypeF32, {uint64_t{1} << 58}, kGgufTruncatedData));
  cases.push_back(
      dims_case("data_almost_2_63", kTypeI8, {(uint64_t{1} << 63) - 1}, kGgufTruncatedData));
  cases.push_back(dims_case("data_of_experts", kTypeQ4K, {4096, 1536, 128}, kGgufTruncatedData));

  const auto trailing = [&](std::string name, std::string file) {
    cases.push_back({"trailing_" + name, std::move(file), kGgufTrailingData});
  };
  trailing("byte", one_tensor(33));
  trailing("alignment_of_zeros", one_tensor(32) + std::string(32, '\0'));
  trailing("second_file", one_tensor(32) + one_tensor(32));
  trailing("byte_without_tensors", gguf({.data_bytes = 1}));
  trailing("byte_behind_keys", gguf({.entries = {gguf_entry("k", kGgufU8, "x")}, .data_bytes = 1}));
}

}  // namespace

const std::vector<std::pair<std::string, std::string>>& gguf_bad_texts() {
  static const std::vector<std::pair<std::string, std::string>> texts = {
      {"empty", ""},
      {"nul", std::string("a\0b", 3)},
      {"newline", "a\nb"},
      {"escape_sequence", "\x1B[2J"},
      {"delete", "a\x7F"},
      {"latin_1", "gr\xFC\xDF"},
      {"overlong_slash", "\xC0\xAF"},
      {"surrogate", "a\xED\xA0\x80"},
      {"cut_sequence", "a\xE2\x82"},
      {"beyond_10ffff", "\xF4\x90\x80\x80"},
  };
  return texts;
}

void add_malformed_tensors(GgufCases& cases) {
  add_twin_cases(cases);
  add_name_length_cases(cases);
  add_tensor_cases(cases);
  add_size_cases(cases);
  add_layout_cases(cases);
}

}  // namespace conclave::testing
