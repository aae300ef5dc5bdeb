#include "io/gguf_bytes.h"
#include "io/gguf_malformed.h"
#include "io/io_test_support.h"

#include <fmt/format.h>

#include <algorithm>

namespace conclave::testing {
namespace {

using enum ErrorCode;
constexpr uint64_t kGibibyte = uint64_t{1} << 30;
constexpr uint64_t kMost = ~uint64_t{0};

// One entry, and data enough that no count is above what the file could hold.
MalformedGguf entry_case(std::string name, std::string entry, ErrorCode code) {
  return {std::move(name), gguf({.entries = {std::move(entry)}, .data_bytes = 32}), code};
}

void add_start_cases(GgufCases& cases) {
  const std::string rest = gguf({}).substr(4);
  for (const std::string_view magic :
       {"GGML", "gguf", "FUGG", "ggjt", "lmgg", "PK\3\4", "\x80\4\x95X"}) {
    cases.push_back({fmt::format("magic_{}", cases.size()), std::string(magic) + rest, kGgufMagic});
  }
  cases.push_back({"magic_nul", std::string(4, '\0') + rest, kGgufMagic});
  cases.push_back({"magic_of_safetensors", safetensors("{}            "), kGgufMagic});
  cases.push_back({"magic_behind_a_byte", "\n" + gguf({}), kGgufMagic});
  for (const uint32_t version : {0U, 1U, 4U, 0x0200'0000U, 0x0300'0000U, 0x8000'0003U, ~0U}) {
    cases.push_back({fmt::format("version_{}", version), gguf({.version = version}), kGgufVersion});
  }
}

// The file ends within the header, where no count or length has said so before.
void add_cut_cases(GgufCases& cases) {
  for (const size_t bytes : {0U, 1U, 3U, 4U, 7U, 8U, 15U, 16U, 23U}) {
    cases.push_back(
        {fmt::format("cut_at_{}", bytes), gguf({}).substr(0, bytes), kGgufTruncatedHeader});
  }
  const auto cut_entry = [&](std::string name, uint32_t type, std::string_view value) {
    cases.push_back({std::move(name),
                     gguf_header({.entries = {gguf_entry("a.longer.key", type, value)}}),
                     kGgufTruncatedHeader});
  };
  cut_entry("cut_bool", kGgufBoolean, "");
  cut_entry("cut_u16", kGgufU16, "x");
  cut_entry("cut_f32", kGgufF32, "xyz");
  cut_entry("cut_u64", kGgufU64, "1234567");
  cut_entry("cut_string_length", kGgufText, std::string(7, '\0'));
  cut_entry("cut_array_type", kGgufList, "xyz");
  cut_entry("cut_array_length", kGgufList, little_endian(uint32_t{kGgufU8}) + "1234567");
  cut_entry("cut_string_length_in_an_array", kGgufList,
            gguf_array(kGgufText, 2, gguf_text("12345678") + "123"));
  cases.push_back({"cut_before_a_type", gguf_header({.entries = {gguf_text("a.longer.key")}}),
                   kGgufTruncatedHeader});
  const std::string tensor = gguf_tensor("a.longer.name", {1, 1}, kTypeF32, 0);
  for (const size_t missing : {1U, 8U, 9U, 12U, 13U, 20U, 21U}) {
    cases.push_back({fmt::format("cut_tensor_by_{}", missing),
                     gguf_header({.tensors = {tensor.substr(0, tensor.size() - missing)}}),
                     kGgufTruncatedHeader});
  }
}

void add_count_cases(GgufCases& cases) {
  for (const uint64_t count : {uint64_t{3}, kGibibyte, uint64_t{1} << 60, uint64_t{1} << 61,
                               uint64_t{1} << 63, kMost / 56, kMost}) {
    cases.push_back({fmt::format("tensors_{}", count),
                     gguf({.data_bytes = 32, .num_tensors = count}), kGgufCount});
    cases.push_back({fmt::format("keys_{}", count + 3),
                     gguf({.data_bytes = 32, .num_entries = std::max(count, count + 3)}),
                     kGgufCount});
  }
  cases.push_back({"both_counts", gguf({.num_entries = kMost, .num_tensors = kMost}), kGgufCount});
  cases.push_back({"one_tensor_in_no_bytes", gguf_header({.num_tensors = 1}), kGgufCount});
  cases.push_back({"one_key_in_no_bytes", gguf_header({.num_entries = 1}), kGgufCount});
  cases.push_back(
      {"too_many_keys", gguf({.data_bytes = 14 * 262'145, .num_entries = 262'145}), kGgufCount});
}

void add_string_cases(GgufCases& cases) {
  const std::string room(64, 'x');
  for (const uint64_t bytes :
       {uint64_t{65'536}, kGibibyte, uint64_t{1} << 61, uint64_t{1} << 63, kMost - 7, kMost}) {
    const std::string text = little_endian(bytes) + room;
    cases.push_back(entry_case(fmt::format("key_of_{}", bytes), text, kGgufString));
    cases.push_back(entry_case(fmt::format("value_of_{}", bytes), gguf_entry("k", kGgufText, text),
                               kGgufString));
    cases.push_back(entry_case(fmt::format("element_of_{}", bytes),
                               gguf_entry("k", kGgufList, gguf_array(kGgufText, 1, text)),
                               kGgufString));
  }
  cases.push_back(entry_case("key_65536_bytes", gguf_entry(std::string(65'536, 'k'), kGgufU8, "x"),
                             kGgufString));
  cases.push_back({"value_one_over_the_file",
                   gguf_header({.entries = {gguf_entry("k", kGgufText,
                                                       little_endian(uint64_t{9}) + "12345678")}}),
                   kGgufString});
  cases.push_back({"second_element_one_over_the_file",
                   gguf_header({.entries = {gguf_entry(
                                    "k", kGgufList,
                                    gguf_array(kGgufText, 2,
                                               gguf_text("first") + little_endian(uint64_t{9}) +
                                                   "12345678"))}}),
                   kGgufString});
  const std::string long_text((size_t{16} << 20) + 1, 'x');
  cases.push_back(entry_case("value_above_16_mebibytes",
                             gguf_entry("k", kGgufText, gguf_text(long_text)), kGgufString));
  cases.push_back(entry_case(
      "element_above_16_mebibytes",
      gguf_entry("k", kGgufList, gguf_array(kGgufText, 1, gguf_text(long_text))), kGgufString));
}

void add_value_cases(GgufCases& cases) {
  for (const auto& [name, text] : gguf_bad_texts()) {
    cases.push_back(entry_case("key_" + name, gguf_entry(text, kGgufU8, "x"), kGgufKey));
  }
  for (const uint32_t type : {13U, 14U, 256U, 0x8000'0000U, ~0U}) {
    cases.push_back(entry_case(fmt::format("value_type_{}", type),
                               gguf_entry("k", type, std::string(16, '\0')), kGgufValueType));
    cases.push_back(entry_case(fmt::format("element_type_{}", type),
                               gguf_entry("k", kGgufList, gguf_array(type, 0)), kGgufValueType));
  }
  for (const char value : {'\2', '\x7F', '\xFF'}) {
    const std::string bytes(1, value);
    cases.push_back(entry_case(fmt::format("bool_{}", static_cast<int>(value)),
                               gguf_entry("k", kGgufBoolean, bytes), kGgufBool));
    cases.push_back(entry_case(
        fmt::format("bool_{}_in_an_array", static_cast<int>(value)),
        gguf_entry("k", kGgufList, gguf_array(kGgufBoolean, 3, std::string(2, '\1') + bytes)),
        kGgufBool));
  }
}

void add_array_cases(GgufCases& cases) {
  const auto array_case = [&](std::string name, std::string_view value) {
    cases.push_back(entry_case(std::move(name), gguf_entry("k", kGgufList, value), kGgufArray));
  };
  array_case("array_of_no_arrays", gguf_array(kGgufList, 0));
  array_case("array_of_arrays", gguf_array(kGgufList, 1, gguf_array(kGgufU8, 1, "x")));
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += gguf_array(kGgufList, 1);
  array_case("arrays_100000_deep", deep);
  for (const uint64_t count : {uint64_t{1} << 29, uint64_t{1} << 60, uint64_t{1} << 61,
                               (uint64_t{1} << 61) + 1, uint64_t{1} << 63, kMost}) {
    for (const uint32_t type : {kGgufU8, kGgufI16, kGgufF32, kGgufText, kGgufU64}) {
      array_case(fmt::format("array_of_{}_of_type_{}", count, type),
                 gguf_array(type, count, std::string(16, '\0')));
    }
  }
  cases.push_back(
      {"array_one_over_the_file",
       gguf_header({.entries = {gguf_entry("k", kGgufList, gguf_array(kGgufU16, 5, "12345678"))}}),
       kGgufArray});
}

void add_key_cases(GgufCases& cases) {
  const auto keys_case = [&](std::string name, std::vector<std::string> entries) {
    cases.push_back({std::move(name), gguf({.entries = std::move(entries)}), kGgufDuplicateKey});
  };
  const std::string entry = gguf_entry("k", kGgufU32, 1U);
  keys_case("key_twice", {entry, entry});
  keys_case("key_twice_of_two_types", {entry, gguf_entry("k", kGgufText, gguf_text("1"))});
  keys_case("alignment_twice", {gguf_entry("general.alignment", kGgufU32, 32U),
                                gguf_entry("general.alignment", kGgufU32, 64U)});
  keys_case("key_twice_among_others",
            {entry, gguf_entry("l", kGgufU32, 1U), gguf_entry("m", kGgufU32, 1U), entry});
}

void add_alignment_cases(GgufCases& cases) {
  const auto alignment_case = [&](std::string name, uint32_t type, std::string_view value) {
    cases.push_back({"alignment_" + name,
                     gguf({.entries = {gguf_entry("general.alignment", type, value)},
                           .tensors = {gguf_tensor("a", {8}, kTypeF32, 0)},
                           .data_bytes = 32}),
                     kGgufAlignment});
  };
  for (const uint32_t value :
       {0U, 1U, 2U, 3U, 4U, 12U, 31U, 33U, 65'537U, 131'072U, 0x8000'0000U, ~0U}) {
    alignment_case(std::to_string(value), kGgufU32, little_endian(value));
  }
  alignment_case("of_64_bits", kGgufU64, little_endian((uint64_t{1} << 32) + 32));
  alignment_case("signed", kGgufI32, little_endian(32));
  alignment_case("negative", kGgufI64, little_endian(int64_t{-32}));
  alignment_case("f32", kGgufF32, little_endian(32.0F));
  alignment_case("bool", kGgufBoolean, "\1");
  alignment_case("text", kGgufText, gguf_text("32"));
  alignment_case("array", kGgufList, gguf_array(kGgufU32, 1, little_endian(32U)));
}

}  // namespace

void add_malformed_entries(GgufCases& cases) {
  add_start_cases(cases);
  add_cut_cases(cases);
  add_count_cases(cases);
  add_string_cases(cases);
  add_value_cases(cases);
  add_array_cases(cases);
  add_key_cases(cases);
  add_alignment_cases(cases);
}

}  // namespace conclave::testing
