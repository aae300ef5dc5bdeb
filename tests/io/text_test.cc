#include "io/text.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace conclave::testing {
namespace {

// Decodes by the definition, one code point at a time.
bool is_well_formed(const std::string& text) {
  size_t at = 0;
  while (at < text.size()) {
    const auto lead = static_cast<unsigned char>(text[at]);
    const int extra = lead < 0x80         ? 0
                      : lead >> 5 == 0x6  ? 1
                      : lead >> 4 == 0xE  ? 2
                      : lead >> 3 == 0x1E ? 3
                                          : -1;
    if (extra < 0 || at + static_cast<size_t>(extra) >= text.size()) return false;
    uint32_t value = extra == 0 ? lead : lead & (0x3Fu >> extra);
    for (int i = 1; i <= extra; ++i) {
      const auto next = static_cast<unsigned char>(text[at + static_cast<size_t>(i)]);
      if (next >> 6 != 0x2) return false;
      value = value << 6 | (next & 0x3Fu);
    }
    const uint32_t lowest[] = {0, 0x80, 0x800, 0x10000};
    if (value < lowest[extra] || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) {
      return false;
    }
    at += static_cast<size_t>(extra) + 1;
  }
  return true;
}

TEST(Utf8, AllShortSequences_AgreeWithTheDefinition) {
  const auto check = [](const std::string& text) {
    ASSERT_EQ(!io::find_invalid_utf8(text).has_value(), is_well_formed(text))
        << io::show_text(text);
  };
  for (unsigned a = 0; a < 256; ++a) {
    for (unsigned b = 0; b < 256; ++b) {
      check({static_cast<char>(a), static_cast<char>(b)});
      for (const unsigned c : {0x00u, 0x7Fu, 0x80u, 0x8Fu, 0x90u, 0x9Fu, 0xA0u, 0xBFu, 0xC0u}) {
        check({static_cast<char>(a), static_cast<char>(b), static_cast<char>(c)});
        check({static_cast<char>(a), static_cast<char>(b), static_cast<char>(c),
               static_cast<char>(0x80)});
      }
    }
  }
}

TEST(Utf8, BadByteAfterLongAscii_FoundAtItsOffset) {
  for (size_t at = 0; at < 40; ++at) {
    std::string text(40, 'a');
    text[at] = '\x80';
    EXPECT_EQ(io::find_invalid_utf8(text), at);
  }
  EXPECT_EQ(io::find_invalid_utf8(std::string(1000, 'a')), std::nullopt);
}

TEST(PlainText, ControlCharactersAndBadBytes_AreNoPartOfIt) {
  for (unsigned i = 0; i < 256; ++i) {
    const std::string text = {'a', static_cast<char>(i), 'b'};
    EXPECT_EQ(io::has_control_character(text), i < 0x20 || i == 0x7F) << i;
    EXPECT_EQ(io::is_plain_text(text), i >= 0x20 && i < 0x7F) << i;
  }
  EXPECT_TRUE(io::is_plain_text("\xC3\xA9"));
  EXPECT_TRUE(io::is_plain_text(""));
}

TEST(ShowText, HostileText_IsHarmlessAndShort) {
  EXPECT_EQ(io::show_text("a\x1b[2J\n\"\\\xff\xC3\xA9"), "\"a\\x1b[2J\\x0a\\\"\\\\\\xff\xC3\xA9\"");
  EXPECT_EQ(io::show_text(std::string(1000, 'x')),
            '"' + std::string(160, 'x') + "\" ... (1000 bytes)");
  EXPECT_EQ(io::show_text(""), "\"\"");
}

}  // namespace
}  // namespace conclave::testing
