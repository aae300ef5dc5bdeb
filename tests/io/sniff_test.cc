#include "io/sniff.h"

#include "io/directory.h"
#include "io/io_test_support.h"

#include "conclave/safetensors.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace conclave::testing {
namespace {

using namespace std::string_view_literals;

TEST(Sniff, ForeignFormats_RefusedByContentUnderAnyName) {
  const TemporaryDirectory directory;
  const std::string tar = std::string(257, '\0') + "ustar";
  const std::pair<std::string_view, std::string_view> cases[] = {
      {"PK\x03\x04\0\0\x08\x08"sv, "zip"},
      {"PK\x05\x06\0\0\0\0"sv, "zip"},
      {"\x80\x02}q\x01."sv, "pickle"},
      {"\x80\x04\x95\x10\0\0\0\0\0\0\0}"sv, "pickle"},
      {"\x80\x05\x95\x10\0\0\0\0\0\0\0}"sv, "pickle"},
      {"\x89HDF\r\n\x1a\n\0\0"sv, "HDF5"},
      {"\x93NUMPY\x01\0v\0{'descr'"sv, "numpy"},
      {"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0"sv, "GGUF"},
      {"\x7f"
       "ELF\x02\x01\x01\0"sv,
       "ELF"},
      {"\x1f\x8b\x08\0\0\0\0\0"sv, "gzip"},
      {tar, "tar"},
      {"#!/bin/sh\n"sv, "script"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"sv, "Git LFS"},
      {"<!DOCTYPE html><html>"sv, "HTML"},
  };
  for (const auto& [content, format] : cases) {
    for (const char* name : {"model.safetensors", "config.json"}) {
      const auto path = directory.write(name, content);
      std::string what;
      const auto code = code_of(
          [&] {
            if (name == "config.json"sv) {
              io::Directory::open(directory.path()).read_json(name);
            } else {
              SafetensorsFile::open(path);
            }
          },
          &what);
      EXPECT_EQ(name_of(code), "kForbiddenFormat") << format << ": " << what;
      EXPECT_NE(what.find(format), std::string::npos) << what;
      EXPECT_NE(what.find(name), std::string::npos) << what;
    }
  }
}

// "PK\3\4" is also a header of 67,324,752 bytes, and "\x80\2" one of 640.
TEST(Sniff, LengthThatLooksLikeMagic_IsSafetensors) {
  const std::string header = "{" + std::string(0x280 - 2, ' ') + "}";
  const TemporaryDirectory directory;
  EXPECT_EQ(
      SafetensorsFile::open(directory.write("a.safetensors", safetensors(header))).tensors().size(),
      0U);
  EXPECT_EQ(code_of([] {
              io::refuse_foreign_format(bytes_of("PK\x03\x04\0\0\0\0{}"sv), "a.safetensors");
            }),
            std::nullopt);
}

TEST(Sniff, JsonAndShortTexts_Pass) {
  for (const std::string_view text : {""sv, "{"sv, "{}"sv, "[1]"sv, "  {\"a\": 1}"sv, "M"sv}) {
    EXPECT_EQ(code_of([&] { io::refuse_foreign_format(bytes_of(text), "a.json"); }), std::nullopt);
  }
}

}  // namespace
}  // namespace conclave::testing
