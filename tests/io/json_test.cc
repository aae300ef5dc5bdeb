#include "io/json.h"

#include "io/io_test_support.h"
#include "io/text.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace conclave::testing {
namespace {

using io::JsonDocument;
using io::JsonLimits;
using io::JsonMember;
using io::JsonType;
using io::JsonValue;

JsonDocument parse(std::string text, const JsonLimits& limits = {}) {
  return JsonDocument::parse(std::move(text), "config.json", limits);
}

std::string code_for(std::string text, const JsonLimits& limits = {}) {
  return name_of(code_of([&] { parse(std::move(text), limits); }));
}

TEST(Json, EveryType_ReadsBack) {
  const JsonDocument document = parse(
      R"({"n":null,"t":true,"f":false,"i":-12,"d":2.5e-1,"s":"x","a":[1,[],{}],"o":{"k":"v"}})");
  const JsonValue root = document.root();
  EXPECT_TRUE(root.at("n").is_null());
  EXPECT_TRUE(root.at("t").as_bool());
  EXPECT_FALSE(root.at("f").as_bool());
  EXPECT_EQ(root.at("i").as_int64(), -12);
  EXPECT_EQ(root.at("i").as_double(), -12.0);
  EXPECT_EQ(root.at("d").as_double(), 0.25);
  EXPECT_EQ(root.at("s").as_string(), "x");
  EXPECT_EQ(root.at("a").size(), 3U);
  EXPECT_EQ(root.at("o").at("k").as_string(), "v");
  EXPECT_EQ(root.size(), 8U);
}

TEST(Json, Containers_IterateInOrder) {
  const JsonDocument document = parse(R"({"z":[3,1,2],"a":{},"m":[]})");
  std::string keys;
  for (const auto& [key, value] : document.root().members()) keys += key;
  EXPECT_EQ(keys, "zam");
  std::vector<int64_t> items;
  for (const JsonValue item : document.root().at("z").items()) items.push_back(item.as_int64());
  EXPECT_EQ(items, (std::vector<int64_t>{3, 1, 2}));
  for (const JsonValue item : document.root().at("m").items()) FAIL() << item.path();
  for (const JsonMember& member : document.root().at("a").members()) FAIL() << member.key;
}

TEST(Json, Escapes_DecodeInKeysAndValues) {
  const JsonDocument document =
      parse(R"({"\u006bey":"\"\\\/\b\f\n\r\t\u0000\u00e9\u20ac\ud83d\ude00|","next":"x"})");
  EXPECT_EQ(document.root().at("key").as_string(),
            std::string_view("\"\\/\b\f\n\r\t\0\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80|", 19));
  EXPECT_EQ(document.root().at("next").as_string(), "x");
}

TEST(Json, SurrogatePairs_DecodeAtEveryEndOfTheirRanges) {
  const JsonDocument document = parse(
      R"(["\ud800\udc00","\ud800\udfff","\udbff\udc00","\udbff\udfff","\ud7ff","\ue000","\uffff"])");
  const std::vector<std::string_view> expected = {
      "\xF0\x90\x80\x80", "\xF0\x90\x8F\xBF", "\xF4\x8F\xB0\x80", "\xF4\x8F\xBF\xBF",
      "\xED\x9F\xBF",     "\xEE\x80\x80",     "\xEF\xBF\xBF"};
  std::vector<std::string_view> decoded;
  for (const JsonValue item : document.root().items()) decoded.push_back(item.as_string());
  EXPECT_EQ(decoded, expected);
}

TEST(Json, MovedDocument_KeepsItsValues) {
  JsonDocument first = parse(R"({"a":"short"})");
  const JsonValue value = first.root().at("a");
  const JsonDocument second = std::move(first);
  EXPECT_EQ(value.as_string(), "short");
}

TEST(Json, IntegerRange_ExactWithinInt64) {
  const JsonDocument document = parse(
      "[9223372036854775807,-9223372036854775808,9223372036854775808,"
      "1000000000000000019884624838656]");
  std::vector<JsonValue> values;
  for (const JsonValue value : document.root().items()) values.push_back(value);
  EXPECT_EQ(values[0].as_int64(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(values[1].as_int64(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(values[2].type(), JsonType::kFloat);
  EXPECT_EQ(values[3].as_double(), 1e30);
  EXPECT_EQ(name_of(code_of([&] { values[2].as_int64(); })), "kJsonType");
}

TEST(Json, DoubleRange_VanishingIsZeroAndHugeIsRefused) {
  const JsonDocument document = parse("[1e-400,-1e-400,1E-400,0.0000001e-330]");
  for (const JsonValue value : document.root().items()) EXPECT_EQ(value.as_double(), 0.0);
  EXPECT_EQ(code_for("[1e400]"), "kJsonSyntax");
  EXPECT_EQ(code_for("[-1e400]"), "kJsonSyntax");
}

TEST(Json, NonFiniteLiterals_OnlyWhereAllowed) {
  const JsonDocument document = parse("[NaN,Infinity,-Infinity]", io::kConfigLimits);
  std::vector<double> values;
  for (const JsonValue value : document.root().items()) values.push_back(value.as_double());
  EXPECT_TRUE(std::isnan(values[0]));
  EXPECT_EQ(values[1], std::numeric_limits<double>::infinity());
  EXPECT_EQ(values[2], -std::numeric_limits<double>::infinity());
  for (const char* text : {"NaN", "Infinity", "-Infinity", "[nan]"}) {
    EXPECT_EQ(code_for(text), "kJsonSyntax") << text;
  }
}

TEST(Json, WrongType_NamesFilePathAndBoth) {
  const JsonDocument document = parse(R"({"rope":{"factors":[1,2,"three"]},"a.b":1})");
  const auto message = [&](auto body) {
    std::string what;
    EXPECT_EQ(name_of(code_of(body, &what)), "kJsonType");
    return what;
  };
  const JsonValue root = document.root();
  EXPECT_EQ(message([&] {
              for (const JsonValue item : root.at("rope").at("factors").items()) item.as_int64();
            }),
            "config.json: rope.factors[2]: the value has the wrong type; expected an integer; "
            "found \"three\"");
  EXPECT_EQ(message([&] { root.at("a.b").as_string(); }),
            "config.json: \"a.b\": the value has the wrong type; expected a string; found 1");
  EXPECT_EQ(message([&] { root.as_bool(); }),
            "config.json: the value has the wrong type; expected a boolean; found an object");
  message([&] { root.at("rope").at("factors").find("x"); });
  message([&] { root.at("rope").items(); });
  message([&] { root.at("a.b").size(); });
  message([&] { root.at("a.b").as_bool(); });
  message([&] { root.at("rope").as_double(); });
}

TEST(Json, KeyThatIsLongOrUnfitToShow_IsEscapedInItsPath) {
  const auto path_of = [](const std::string& key) {
    const JsonDocument document = parse("{\"" + key + "\":1}");
    for (const JsonMember& member : document.root().members()) return member.value.path();
    return std::string();
  };
  EXPECT_EQ(path_of("kept_as-it'is"), "kept_as-it'is");
  EXPECT_EQ(path_of(R"(tab\tand \\ and \u007f)"), R"("tab\x09and \\ and \x7f")");
  // At one of these lengths what is cut and what the escapes add come to the same.
  for (size_t length = 1; length < 300; ++length) {
    for (const char* start : {R"(\n)", R"(\n\\\\)"}) {
      const std::string path = path_of(start + std::string(length, 'x'));
      EXPECT_TRUE(io::is_plain_text(path)) << length;
      EXPECT_LE(path.size(), 200U);
    }
  }
}

TEST(Json, MissingKey_NamesItsPath) {
  const JsonDocument document = parse(R"({"text_config":{"a":null}})");
  std::string what;
  const JsonValue text = document.root().at("text_config");
  EXPECT_EQ(name_of(code_of([&] { text.at("num_experts_per_tok"); }, &what)), "kConfigMissingKey");
  EXPECT_EQ(what, "config.json: text_config.num_experts_per_tok: the key is missing");
  EXPECT_EQ(text.find("b"), std::nullopt);
  EXPECT_TRUE(text.find("a").has_value());
  EXPECT_EQ(text.find_set("a"), std::nullopt);
}

TEST(Json, CallersRule_CarriesPathAndValue) {
  const JsonDocument document = parse(R"({"num_experts":0})");
  std::string what;
  const auto code = code_of(
      [&] {
        document.root()
            .at("num_experts")
            .reject(ErrorCode::kConfigValue, "no experts", "at least 1", "check the file");
      },
      &what);
  EXPECT_EQ(name_of(code), "kConfigValue");
  EXPECT_EQ(what,
            "config.json: num_experts: no experts; expected at least 1; found 0 (check the file)");
}

TEST(Json, Malformed_Refused) {
  for (const std::string_view text :
       {"", " ", "{", "}", "[", "]", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "{\"a\"}", "{\"a\":}",
        "{\"a\":1,}", "{\"a\" 1}", "{a:1}", "{'a':1}", "[01]", "[-]", "[+1]", "[.5]", "[1.]",
        "[1e]", "[1e+]", "[0x1]", "[--1]", "tru", "truee", "nul", "nulll", "None", "\"a", "\"\\",
        "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\ud800\"", "\"\\udc00\"", "\"\\ud800\\u0041\"",
        // These are one off at either end of either half of a pair.
        "\"\\udc00\\udc00\"", "\"\\udbff\\udbff\"", "\"\\ud800\\ue000\"", "\"\\udfff\\udfff\"",
        "\"\\ud7ff\\udc00\"", "\"\\ue000\\udc00\"", "\"\n\"", "\"\x01\"", "\"\x1f\"", "[1]x",
        "[1][2]", "1 2", "//c\n1", "/*c*/1", "\f1", "\xEF\xBB\xBF{}", "\"\xC0\xAF\"", "\"\x80\"",
        "{}\xFF", "[1}", "{\"a\":1]"}) {
    EXPECT_EQ(code_for(std::string(text)), "kJsonSyntax") << text;
  }
  EXPECT_EQ(code_for(std::string("{}\0", 3)), "kJsonSyntax");
  EXPECT_EQ(code_for(std::string("\0{}", 3)), "kJsonSyntax");
}

TEST(Json, DuplicateKeys_RefusedAtEveryLevel) {
  std::string what;
  const auto code = code_of([&] { parse(R"({"a":[{"x":{"k":1,"\u006b":2}}]})"); }, &what);
  EXPECT_EQ(name_of(code), "kJsonDuplicateKey");
  EXPECT_EQ(what,
            "config.json: a[0].x.k: the key appears twice in one object; expected every key once; "
            "found 2");
  EXPECT_EQ(code_for(R"({"a":1,"b":2,"a":1})"), "kJsonDuplicateKey");
  EXPECT_EQ(code_for(R"({"":1,"":1})"), "kJsonDuplicateKey");
  EXPECT_EQ(code_for(R"({"a":{"k":1},"b":{"k":1}})"), "no error");
}

TEST(Json, Limits_Hold) {
  const JsonLimits limits = {.max_bytes = 20, .max_depth = 3, .max_values = 4};
  EXPECT_EQ(code_for(std::string(20, ' ') + "1", limits), "kJsonTooLarge");
  EXPECT_EQ(code_for(std::string(19, ' ') + "1", limits), "no error");
  EXPECT_EQ(code_for("[[[]]]", limits), "no error");
  EXPECT_EQ(code_for("[[[[]]]]", limits), "kJsonTooDeep");
  EXPECT_EQ(code_for("[1,2,3]", limits), "no error");
  EXPECT_EQ(code_for("[1,2,3,4]", limits), "kJsonTooLarge");
  EXPECT_EQ(code_for(std::string(1'000'000, '[')), "kJsonTooDeep");
  const std::string text = "[]";
  EXPECT_EQ(name_of(code_of(
                [&] { JsonDocument::parse(bytes_of(text), "config.json", {.max_bytes = 1}); })),
            "kJsonTooLarge");
  EXPECT_EQ(JsonDocument::parse(bytes_of(text), "config.json").root().size(), 0U);
}

// Whether another library reads the same text in the same way.
bool same(const JsonValue& ours, const nlohmann::json& theirs) {
  switch (ours.type()) {
    case JsonType::kNull:
      return theirs.is_null();
    case JsonType::kBool:
      return theirs.is_boolean() && theirs.get<bool>() == ours.as_bool();
    case JsonType::kInteger:
      return theirs.is_number_integer() && theirs.get<int64_t>() == ours.as_int64();
    case JsonType::kFloat:
      return theirs.is_number() && theirs.get<double>() == ours.as_double();
    case JsonType::kString:
      return theirs.is_string() && theirs.get_ref<const std::string&>() == ours.as_string();
    case JsonType::kArray: {
      size_t i = 0;
      for (const JsonValue item : ours.items()) {
        if (i >= theirs.size() || !same(item, theirs[i++])) return false;
      }
      return theirs.is_array() && i == theirs.size();
    }
    case JsonType::kObject: {
      for (const auto& [key, value] : ours.members()) {
        const auto found = theirs.find(std::string(key));
        if (found == theirs.end() || !same(value, *found)) return false;
      }
      return theirs.is_object() && ours.size() == theirs.size();
    }
  }
  return false;
}

TEST(Json, MutatedDocuments_NeverReadDifferentlyFromAnotherParser) {
  const std::string seed =
      R"({"a":[1,-2,3.5e2,true,null,"x\ud83d\ude00\n"],"b":{"c":{"d":[[],{}]}},"e":0.1,"f":18446744073709551615})";
  const std::string_view alphabet = "{}[]\",:\\u0123456789.eE+-tfn dD8 ";
  std::mt19937 random(99);
  size_t accepted = 0;
  const int trials = kIsInstrumented ? 20'000 : 200'000;
  for (int trial = 0; trial < trials; ++trial) {
    std::string text = seed;
    for (size_t edits = random() % 3 + 1; edits > 0; --edits) {
      const size_t at = random() % text.size();
      const char letter = alphabet[random() % alphabet.size()];
      switch (random() % 3) {
        case 0:
          text[at] = letter;
          break;
        case 1:
          text.insert(at, 1, letter);
          break;
        default:
          text.erase(at, 1);
          break;
      }
    }
    const auto ours = [&]() -> std::optional<JsonDocument> {
      try {
        return parse(text);
      } catch (const Error&) {
        return std::nullopt;
      }
    }();
    if (!ours) continue;
    ++accepted;
    const nlohmann::json theirs = nlohmann::json::parse(text, nullptr, false);
    ASSERT_FALSE(theirs.is_discarded()) << text;
    ASSERT_TRUE(same(ours->root(), theirs)) << text;
  }
  EXPECT_GT(accepted, static_cast<size_t>(trials) / 50);
}

}  // namespace
}  // namespace conclave::testing
