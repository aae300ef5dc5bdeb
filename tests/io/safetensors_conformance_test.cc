// Bars S1 and S4: hand-made files, each with the only code it may be refused with.
#include "io/io_test_support.h"

#include "conclave/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace conclave::testing {
namespace {

using enum ErrorCode;

struct MalformedCase {
  std::string name;
  std::string file;
  ErrorCode code;
};

// Puts `body` between the braces of the header.
MalformedCase header_case(std::string name, std::string_view body, size_t data_bytes,
                          ErrorCode code) {
  return {std::move(name), safetensors(fmt::format("{{{}}}", body), data_bytes), code};
}

// Makes one tensor "a" of four bytes with these fields.
MalformedCase entry_case(std::string name, std::string_view fields, ErrorCode code) {
  return header_case(std::move(name), fmt::format(R"("a":{{{}}})", fields), 4, code);
}

MalformedCase shape_case(std::string name, std::string_view shape, ErrorCode code) {
  return header_case(std::move(name), entry("a", "F32", shape, "[0,4]"), 4, code);
}

MalformedCase offsets_case(std::string name, std::string_view offsets, ErrorCode code) {
  return header_case(std::move(name), entry("a", "F32", "[1]", offsets), 4, code);
}

MalformedCase name_case(std::string name, std::string_view tensor_name, ErrorCode code) {
  return header_case(std::move(name), entry(tensor_name, "F32", "[1]", "[0,4]"), 4, code);
}

void add_length_cases(std::vector<MalformedCase>& cases) {
  cases.push_back({"no_bytes", "", kSafetensorsTooShort});
  cases.push_back({"seven_bytes", std::string(7, '\0'), kSafetensorsTooShort});
  cases.push_back({"no_header", length_prefix(0), kSafetensorsJson});
  cases.push_back(
      {"one_over_the_limit", length_prefix(100'000'001) + "{}", kSafetensorsHeaderTooLarge});
  cases.push_back({"length_2_63", length_prefix(1ULL << 63) + "{}", kSafetensorsHeaderTooLarge});
  cases.push_back({"length_2_64_minus_1", length_prefix(~0ULL) + "{}", kSafetensorsHeaderTooLarge});
  cases.push_back({"length_minus_7", length_prefix(~0ULL - 6) + "{}", kSafetensorsHeaderTooLarge});
  cases.push_back({"one_byte_short", length_prefix(3) + "{}", kSafetensorsHeaderTruncated});
  cases.push_back({"limit_in_a_small_file", length_prefix(100'000'000) + std::string(32, ' '),
                   kSafetensorsHeaderTruncated});
  cases.push_back({"only_a_length", length_prefix(2), kSafetensorsHeaderTruncated});
}

void add_text_cases(std::vector<MalformedCase>& cases) {
  cases.push_back(name_case("utf8_lone_continuation", "a\x80", kSafetensorsUtf8));
  cases.push_back(name_case("utf8_overlong", "a\xC0\xAF", kSafetensorsUtf8));
  cases.push_back(name_case("utf8_overlong_3", "a\xE0\x80\xAF", kSafetensorsUtf8));
  cases.push_back(name_case("utf8_overlong_4", "a\xF0\x80\x80\xAF", kSafetensorsUtf8));
  cases.push_back(name_case("utf8_surrogate", "a\xED\xA0\x80", kSafetensorsUtf8));
  cases.push_back(name_case("utf8_beyond_10ffff", "a\xF4\x90\x80\x80", kSafetensorsUtf8));
  cases.push_back(name_case("utf8_lead_f5", "a\xF5\x80\x80\x80", kSafetensorsUtf8));
  cases.push_back({"utf8_cut_sequence", safetensors("{}\xE2\x82"), kSafetensorsUtf8});
  cases.push_back({"utf8_latin1_padding", safetensors("{}      \xA0"), kSafetensorsUtf8});

  cases.push_back({"json_spaces_only", safetensors("      "), kSafetensorsJson});
  cases.push_back({"json_open_brace", safetensors("{"), kSafetensorsJson});
  cases.push_back({"json_close_brace", safetensors("}"), kSafetensorsJson});
  cases.push_back({"json_two_objects", safetensors("{}{}"), kSafetensorsJson});
  cases.push_back({"json_byte_order_mark", safetensors("\xEF\xBB\xBF{}"), kSafetensorsJson});
  cases.push_back(
      {"json_nul_padding", safetensors(std::string_view("{}\0\0", 4)), kSafetensorsJson});
  cases.push_back({"json_form_feed", safetensors("\f{}"), kSafetensorsJson});
  cases.push_back({"json_comment", safetensors("/* */{}"), kSafetensorsJson});
  cases.push_back({"json_line_comment", safetensors("{}//"), kSafetensorsJson});
  cases.push_back({"json_single_quotes", safetensors("{'a':1}"), kSafetensorsJson});
  cases.push_back({"json_bare_key", safetensors("{a:1}"), kSafetensorsJson});
  cases.push_back({"json_lone_comma", safetensors("{,}"), kSafetensorsJson});
  cases.push_back(header_case("json_trailing_comma", entry("a", "F32", "[1]", "[0,4]") + ",", 4,
                              kSafetensorsJson));
  cases.push_back(header_case("json_no_comma",
                              entry("a", "U8", "[1]", "[0,1]") + entry("b", "U8", "[1]", "[1,2]"),
                              2, kSafetensorsJson));
  cases.push_back(header_case("json_no_colon", R"("a"{})", 0, kSafetensorsJson));
  cases.push_back(header_case("json_open_string", R"("a)", 0, kSafetensorsJson));
  cases.push_back(header_case("json_backslash_at_the_end", "\"a\\", 0, kSafetensorsJson));
  cases.push_back(name_case("json_raw_newline", "a\nb", kSafetensorsJson));
  cases.push_back(name_case("json_unknown_escape", "a\\x41", kSafetensorsJson));
  cases.push_back(name_case("json_short_escape", "a\\u12", kSafetensorsJson));
  cases.push_back(name_case("json_bad_escape_digit", "a\\u12G4", kSafetensorsJson));
  cases.push_back(name_case("json_high_surrogate_alone", "\\ud800", kSafetensorsJson));
  cases.push_back(name_case("json_low_surrogate_alone", "\\udc00", kSafetensorsJson));
  cases.push_back(name_case("json_surrogates_swapped", "\\udc00\\ud800", kSafetensorsJson));
  cases.push_back(name_case("json_high_surrogate_twice", "\\ud800\\ud800", kSafetensorsJson));
  cases.push_back(shape_case("json_leading_zero", "[01]", kSafetensorsJson));
  cases.push_back(shape_case("json_array_trailing_comma", "[1,]", kSafetensorsInteger));
  cases.push_back(shape_case("json_point_without_digits", "[1.]", kSafetensorsJson));
  cases.push_back(shape_case("json_exponent_without_digits", "[1e]", kSafetensorsJson));

  cases.push_back({"root_array", safetensors("[]"), kSafetensorsNotObject});
  cases.push_back({"root_null", safetensors("null"), kSafetensorsNotObject});
  cases.push_back({"root_string", safetensors("\"{}\""), kSafetensorsNotObject});
  cases.push_back({"root_number", safetensors("42"), kSafetensorsNotObject});
  cases.push_back({"root_true", safetensors(" true"), kSafetensorsNotObject});
  cases.push_back(
      {"root_nested_arrays", safetensors(std::string(50'000, '[')), kSafetensorsNotObject});
}

void add_name_cases(std::vector<MalformedCase>& cases) {
  cases.push_back(header_case("metadata_array", R"("__metadata__":[])", 0, kSafetensorsMetadata));
  cases.push_back(header_case("metadata_null", R"("__metadata__":null)", 0, kSafetensorsMetadata));
  cases.push_back(
      header_case("metadata_number", R"("__metadata__":{"a":1})", 0, kSafetensorsMetadata));
  cases.push_back(
      header_case("metadata_nested", R"("__metadata__":{"a":{"b":"c"}})", 0, kSafetensorsMetadata));
  cases.push_back(
      header_case("metadata_null_value", R"("__metadata__":{"a":null})", 0, kSafetensorsMetadata));
  cases.push_back(header_case("metadata_duplicate", R"("__metadata__":{"a":"1","a":"1"})", 0,
                              kSafetensorsDuplicateKey));
  cases.push_back(header_case("metadata_twice", R"("__metadata__":{},"__metadata__":{})", 0,
                              kSafetensorsDuplicateKey));
  cases.push_back(header_case("metadata_twice_escaped",
                              R"("__metadata__":{},"__metadata\u005f_":{})", 0,
                              kSafetensorsDuplicateKey));
  std::string many;
  for (int i = 0; i < 65'537; ++i) many += fmt::format(R"({}"{}":"")", i == 0 ? "" : ",", i);
  cases.push_back(header_case("metadata_too_many", fmt::format(R"("__metadata__":{{{}}})", many), 0,
                              kSafetensorsMetadata));
  cases.push_back(header_case(
      "metadata_too_large",
      fmt::format(R"("__metadata__":{{"a":"{}"}})", std::string((size_t{16} << 20) + 1, 'x')), 0,
      kSafetensorsMetadata));

  const std::string first = entry("a", "U8", "[1]", "[0,1]");
  cases.push_back(header_case("name_twice", first + "," + entry("a", "U8", "[1]", "[1,2]"), 2,
                              kSafetensorsDuplicateKey));
  cases.push_back(
      header_case("name_twice_same_bytes", first + "," + first, 1, kSafetensorsDuplicateKey));
  cases.push_back(header_case("name_twice_escaped",
                              first + "," + entry("\\u0061", "U8", "[1]", "[1,2]"), 2,
                              kSafetensorsDuplicateKey));
  cases.push_back(name_case("name_nul", "a\\u0000b", kSafetensorsName));
  cases.push_back(name_case("name_newline", "a\\nb", kSafetensorsName));
  cases.push_back(name_case("name_escape_character", "a\\u001b[2J", kSafetensorsName));
  cases.push_back(name_case("name_delete", "a\x7f", kSafetensorsName));
  cases.push_back(name_case("name_too_long", std::string(4097, 'n'), kSafetensorsName));
}

void add_entry_cases(std::vector<MalformedCase>& cases) {
  const std::string_view dtype = R"("dtype":"F32")";
  const std::string_view shape = R"("shape":[1])";
  const std::string_view offsets = R"("data_offsets":[0,4])";
  const auto fields = [](auto... field) {
    return fmt::format("{}", fmt::join(std::initializer_list<std::string_view>{field...}, ","));
  };
  cases.push_back(header_case("entry_array", R"("a":[])", 0, kSafetensorsEntry));
  cases.push_back(header_case("entry_null", R"("a":null)", 0, kSafetensorsEntry));
  cases.push_back(header_case("entry_string", R"("a":"F32")", 0, kSafetensorsEntry));
  cases.push_back(entry_case("entry_empty", "", kSafetensorsEntry));
  cases.push_back(entry_case("entry_no_dtype", fields(shape, offsets), kSafetensorsEntry));
  cases.push_back(entry_case("entry_no_shape", fields(dtype, offsets), kSafetensorsEntry));
  cases.push_back(entry_case("entry_no_offsets", fields(dtype, shape), kSafetensorsEntry));
  cases.push_back(
      entry_case("entry_dtype_twice", fields(dtype, shape, offsets, dtype), kSafetensorsEntry));
  cases.push_back(
      entry_case("entry_shape_twice", fields(shape, dtype, offsets, shape), kSafetensorsEntry));
  cases.push_back(
      entry_case("entry_offsets_twice", fields(offsets, offsets, dtype, shape), kSafetensorsEntry));
  cases.push_back(entry_case("entry_unknown_field",
                             fields(dtype, shape, offsets, R"("strides":[1])"), kSafetensorsEntry));

  for (const std::string_view value :
       {R"("F128")", R"("f32")", R"("I4")", R"("NF4")", R"("bfloat16")", R"("")", R"("F32 ")", "32",
        "null", "[\"F32\"]"}) {
    cases.push_back(entry_case(fmt::format("dtype_{}", cases.size()),
                               fmt::format(R"("dtype":{},{},{})", value, shape, offsets),
                               kSafetensorsDType));
  }
  for (const std::string_view value : {"1", "\"[1]\"", "null", "{}"}) {
    cases.push_back(shape_case(fmt::format("shape_{}", value), value, kSafetensorsShape));
  }
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  cases.push_back(shape_case("shape_rank_65", fmt::format("[{}]", ones), kSafetensorsShape));

  for (const std::string_view value :
       {"-1", "-0", "1.0", "1e0", "1E0", "0.1e1", "18446744073709551616", "1e400", "\"1\"", "true",
        "null", "[1]", "NaN", "Infinity", "+1", "0x1"}) {
    if (value == "0x1") {
      cases.push_back(shape_case("integer_0x1", "[0x1]", kSafetensorsJson));
      continue;
    }
    cases.push_back(shape_case(fmt::format("integer_shape_{}", value), fmt::format("[{}]", value),
                               kSafetensorsInteger));
    cases.push_back(offsets_case(fmt::format("integer_offset_{}", value),
                                 fmt::format("[0,{}]", value), kSafetensorsInteger));
  }
  for (const std::string_view value :
       {"4", "null", "{}", "[]", "[0]", "[0,4,8]", "[4,0]", "[0,9223372036854775807]",
        "[18446744073709551615,18446744073709551615]"}) {
    cases.push_back(offsets_case(fmt::format("offsets_{}", value), value, kSafetensorsOffsets));
  }
}

void add_layout_cases(std::vector<MalformedCase>& cases) {
  const auto two = [](std::string_view first, std::string_view second) {
    return fmt::format("{},{}", entry("a", "U8", "[4]", first), entry("b", "U8", "[4]", second));
  };
  for (const std::string_view shape :
       {"[9223372036854775808]", "[18446744073709551615]", "[4294967296,4294967296]",
        "[4611686018427387904,2]", "[2305843009213693952]", "[0,4294967296,4294967296]",
        "[4294967296,4294967296,0]"}) {
    cases.push_back(shape_case(fmt::format("overflow_{}", shape), shape, kSafetensorsSizeOverflow));
  }
  cases.push_back(
      header_case("sub_byte_f4", entry("a", "F4", "[3]", "[0,2]"), 2, kSafetensorsSubByte));
  cases.push_back(
      header_case("sub_byte_f6", entry("a", "F6_E2M3", "[2]", "[0,2]"), 2, kSafetensorsSubByte));
  cases.push_back(shape_case("mismatch_more", "[2]", kSafetensorsSizeMismatch));
  cases.push_back(shape_case("mismatch_none", "[0]", kSafetensorsSizeMismatch));
  cases.push_back(offsets_case("mismatch_empty_range", "[4,4]", kSafetensorsSizeMismatch));
  cases.push_back(header_case("mismatch_wide_dtype", entry("a", "F64", "[1]", "[0,4]"), 4,
                              kSafetensorsSizeMismatch));
  cases.push_back(
      header_case("hole_at_the_start", entry("a", "U8", "[4]", "[4,8]"), 8, kSafetensorsHole));
  cases.push_back(header_case("hole_between", two("[0,4]", "[5,9]"), 9, kSafetensorsHole));
  cases.push_back(header_case("hole_before_an_empty_tensor", entry("a", "U8", "[0]", "[4,4]"), 4,
                              kSafetensorsHole));
  cases.push_back(header_case("overlap_partial", two("[0,4]", "[3,7]"), 7, kSafetensorsOverlap));
  cases.push_back(header_case("overlap_identical", two("[0,4]", "[0,4]"), 4, kSafetensorsOverlap));
  cases.push_back(header_case(
      "overlap_empty_tensor_inside",
      fmt::format("{},{}", entry("a", "U8", "[4]", "[0,4]"), entry("b", "U8", "[0]", "[2,2]")), 4,
      kSafetensorsOverlap));
  cases.push_back(
      header_case("data_missing", entry("a", "U8", "[4]", "[0,4]"), 0, kSafetensorsTruncatedData));
  cases.push_back(header_case("data_one_short", entry("a", "U8", "[4]", "[0,4]"), 3,
                              kSafetensorsTruncatedData));
  cases.push_back(header_case("data_far_short",
                              entry("a", "U8", "[1099511627776]", "[0,1099511627776]"), 4,
                              kSafetensorsTruncatedData));
  cases.push_back(
      header_case("data_one_over", entry("a", "U8", "[4]", "[0,4]"), 5, kSafetensorsTrailingData));
  cases.push_back(header_case("data_without_tensors", "", 1, kSafetensorsTrailingData));
}

std::vector<MalformedCase> malformed_cases() {
  std::vector<MalformedCase> cases;
  add_length_cases(cases);
  add_text_cases(cases);
  add_name_cases(cases);
  add_entry_cases(cases);
  add_layout_cases(cases);
  return cases;
}

struct ValidCase {
  std::string name;
  std::string file;
  size_t tensors;
};

std::vector<ValidCase> valid_cases() {
  std::vector<ValidCase> cases;
  const auto add = [&](std::string name, std::string_view body, size_t data_bytes, size_t tensors) {
    cases.push_back(
        {std::move(name), safetensors(fmt::format("{{{}}}", body), data_bytes), tensors});
  };
  cases.push_back({"no_tensors", safetensors("{}"), 0});
  cases.push_back({"trailing_spaces", safetensors("{}      "), 0});
  cases.push_back({"leading_spaces", safetensors("   {}"), 0});
  cases.push_back({"all_white_space", safetensors(" \t\r\n{ \t\r\n} \t\r\n"), 0});
  add("rank_0", entry("a", "F32", "[]", "[0,4]"), 4, 1);
  add("zero_dimension", entry("a", "F32", "[0]", "[0,0]"), 0, 1);
  add("zero_dimension_first", entry("a", "F32", "[0,1099511627776]", "[0,0]"), 0, 1);
  add("empty_tensors_share_an_offset",
      entry("a", "F32", "[0]", "[0,0]") + "," + entry("b", "F32", "[3,0]", "[0,0]") + "," +
          entry("c", "U8", "[1]", "[0,1]") + "," + entry("d", "U8", "[0]", "[1,1]"),
      1, 4);
  add("names_against_the_order_of_data",
      entry("b", "U8", "[1]", "[1,2]") + "," + entry("a", "U8", "[1]", "[0,1]"), 2, 2);
  add("spaces_within",
      R"( "a" : { "dtype" : "U8" , "shape" : [ 1 ] , "data_offsets" : [ 0 , 1 ] } )", 1, 1);
  add("fields_in_any_order", R"("a":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"})", 1, 1);
  add("fields_escaped", R"("a":{"\u0064type":"\u00558","shape":[1],"data_offsets":[0,1]})", 1, 1);
  add("name_empty", entry("", "U8", "[1]", "[0,1]"), 1, 1);
  add("name_escaped", entry("\\u0061\\/\\\"\\\\", "U8", "[1]", "[0,1]"), 1, 1);
  add("name_surrogate_pair", entry("\\ud83d\\ude00", "U8", "[1]", "[0,1]"), 1, 1);
  add("name_unicode", entry("gewicht_\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80", "U8", "[1]", "[0,1]"),
      1, 1);
  add("name_longest", entry(std::string(4096, 'n'), "U8", "[1]", "[0,1]"), 1, 1);
  add("name_almost_metadata", entry("__metadata", "U8", "[1]", "[0,1]"), 1, 1);
  add("metadata_empty", R"("__metadata__":{})", 0, 0);
  add("metadata_last", entry("a", "U8", "[1]", "[0,1]") + R"(,"__metadata__":{"k":"v\n"})", 1, 1);
  add("metadata_named_like_a_tensor",
      R"("__metadata__":{"a":"b"},)" + entry("a", "U8", "[1]", "[0,1]"), 1, 1);
  add("f4_whole_bytes", entry("a", "F4", "[2]", "[0,1]"), 1, 1);
  add("f6_whole_bytes", entry("a", "F6_E3M2", "[4]", "[0,3]"), 3, 1);
  add("rank_9", entry("a", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, 1);
  std::string ones = "1";
  for (int i = 0; i < 63; ++i) ones += ",1";
  add("rank_64", entry("a", "U8", fmt::format("[{}]", ones), "[0,1]"), 1, 1);
  add("data_unaligned", entry("a", "U8", "[1]", "[0,1]") + "," + entry("b", "F64", "[1]", "[1,9]"),
      9, 2);
  size_t end = 0;
  std::string all;
  for (const auto& [dtype, bytes] :
       std::initializer_list<std::pair<std::string_view, size_t>>{{"BOOL", 1},
                                                                  {"U8", 1},
                                                                  {"I8", 1},
                                                                  {"U16", 2},
                                                                  {"I16", 2},
                                                                  {"U32", 4},
                                                                  {"I32", 4},
                                                                  {"U64", 8},
                                                                  {"I64", 8},
                                                                  {"F16", 2},
                                                                  {"BF16", 2},
                                                                  {"F32", 4},
                                                                  {"F64", 8},
                                                                  {"C64", 8},
                                                                  {"F8_E4M3", 1},
                                                                  {"F8_E5M2", 1},
                                                                  {"F8_E8M0", 1},
                                                                  {"F8_E4M3FNUZ", 1},
                                                                  {"F8_E5M2FNUZ", 1}}) {
    all += fmt::format("{}{}", all.empty() ? "" : ",",
                       entry(dtype, dtype, "[1]", fmt::format("[{},{}]", end, end + bytes)));
    end += bytes;
  }
  add("every_dtype", all, end, 19);
  return cases;
}

std::optional<ErrorCode> verdict_in_memory(const std::string& file, std::string* what) {
  return code_of(
      [&] { SafetensorsFile::parse_header(bytes_of(file), file.size(), "model.safetensors"); },
      what);
}

TEST(SafetensorsConformance, Malformed_RefusedWithItsOwnCode) {
  const TemporaryDirectory directory;
  const std::vector<MalformedCase> cases = malformed_cases();
  std::set<ErrorCode> codes;
  size_t false_accepts = 0;
  for (const MalformedCase& test : cases) {
    SCOPED_TRACE(test.name);
    std::string what;
    const auto in_memory = verdict_in_memory(test.file, &what);
    EXPECT_EQ(name_of(in_memory), to_string(test.code)) << what;
    EXPECT_NE(what.find("model.safetensors"), std::string::npos) << what;
    const auto path = directory.write("case.safetensors", test.file);
    for (const FileAccess access : {FileAccess::kMap, FileAccess::kRead}) {
      const auto on_disk = code_of([&] { SafetensorsFile::open(path, access); });
      EXPECT_EQ(name_of(on_disk), to_string(test.code));
      if (!on_disk) ++false_accepts;
    }
    if (!in_memory) ++false_accepts;
    codes.insert(test.code);
  }
  EXPECT_GE(cases.size(), 60U);
  fmt::print("S1: {} malformed files, {} distinct codes, false accepts {}\n", cases.size(),
             codes.size(), false_accepts);
}

TEST(SafetensorsConformance, OddButValid_Accepted) {
  const TemporaryDirectory directory;
  const std::vector<ValidCase> cases = valid_cases();
  size_t false_rejects = 0;
  for (const ValidCase& test : cases) {
    SCOPED_TRACE(test.name);
    const auto path = directory.write("case.safetensors", test.file);
    for (const FileAccess access : {FileAccess::kMap, FileAccess::kRead}) {
      std::string what;
      const auto code = code_of(
          [&] {
            const SafetensorsFile file = SafetensorsFile::open(path, access);
            EXPECT_EQ(file.tensors().size(), test.tensors);
          },
          &what);
      EXPECT_EQ(code, std::nullopt) << what;
      if (code) ++false_rejects;
    }
    EXPECT_EQ(verdict_in_memory(test.file, nullptr), std::nullopt);
  }
  EXPECT_GE(cases.size(), 12U);
  fmt::print("S1: {} odd but valid files, false rejects {}\n", cases.size(), false_rejects);
}

TEST(SafetensorsConformance, TooManyTensors_Refused) {
  std::string header = "{";
  for (int i = 0; i <= 1'000'000; ++i) {
    header += fmt::format(R"({}"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                          i == 0 ? "" : ",", i);
  }
  const std::string file = safetensors(header + "}");
  EXPECT_EQ(name_of(verdict_in_memory(file, nullptr)), "kSafetensorsTooManyTensors");
}

// Conforming readers differ on these files, or refuse them.
TEST(SafetensorsConformance, Ambiguous_Refused) {
  const std::string a = entry("a", "U8", "[1]", "[0,1]");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"first or last of two equal names",
       safetensors("{" + a + "," + entry("a", "I8", "[1]", "[0,1]") + "}", 1)},
      {"equal names, one escaped",
       safetensors("{" + a + "," + entry("\\u0061", "U8", "[1]", "[1,2]") + "}", 2)},
      {"repeated field",
       safetensors(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1)},
      {"repeated metadata key", safetensors(R"({"__metadata__":{"k":"1","k":"2"}})")},
      {"unknown field",
       safetensors(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"order":"F"}})", 1)},
      {"minus zero", safetensors("{" + entry("a", "U8", "[1]", "[-0,1]") + "}", 1)},
      {"integral float", safetensors("{" + entry("a", "U8", "[1.0]", "[0,1]") + "}", 1)},
      {"exponent", safetensors("{" + entry("a", "U8", "[1e0]", "[0,1]") + "}", 1)},
      {"2^64 + 1 wraps to 1",
       safetensors("{" + entry("a", "U8", "[18446744073709551617]", "[0,1]") + "}", 1)},
      {"byte order mark", safetensors("\xEF\xBB\xBF{" + a + "}", 1)},
      {"text behind a NUL", safetensors(std::string("{}\0{}", 5))},
      {"lone surrogate", safetensors("{" + entry("\\ud800", "U8", "[1]", "[0,1]") + "}", 1)},
      {"overlong slash", safetensors("{" + entry("\xC0\xAF", "U8", "[1]", "[0,1]") + "}", 1)},
      {"NUL in a name", safetensors("{" + entry("a\\u0000b", "U8", "[1]", "[0,1]") + "}", 1)},
      {"comment", safetensors("{/**/" + a + "}", 1)},
      {"trailing comma", safetensors("{" + a + ",}", 1)},
      {"two documents", safetensors("{" + a + "}{}", 1)},
      {"metadata null", safetensors(R"({"__metadata__":null})")},
      {"overlap", safetensors("{" + a + "," + entry("b", "U8", "[1]", "[0,1]") + "}", 1)},
      {"hole", safetensors("{" + entry("a", "U8", "[1]", "[1,2]") + "}", 2)},
      {"bytes behind the data", safetensors("{" + a + "}", 2)},
      {"size hidden by a zero dimension",
       safetensors("{" + entry("a", "U8", "[0,4294967296,4294967296]", "[0,0]") + "}")},
  };
  size_t accepted = 0;
  for (const auto& [name, file] : cases) {
    SCOPED_TRACE(name);
    const auto code = verdict_in_memory(file, nullptr);
    EXPECT_NE(code, std::nullopt);
    if (!code) ++accepted;
  }
  fmt::print("S4: {} ambiguous headers, accepted {}\n", cases.size(), accepted);
}

}  // namespace
}  // namespace conclave::testing
