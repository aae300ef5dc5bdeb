#include "io/sniff.h"

#include "conclave/error.h"

#include <array>

namespace conclave::inline v0::io {
namespace {

using namespace std::string_view_literals;

struct Signature {
  std::string_view bytes;
  size_t offset;
  std::string_view format;
  std::string_view hint;
};

constexpr auto kConvert =
    "convert the model with save_pretrained(..., safe_serialization=True) where it can be trusted"sv;
constexpr auto kConvertGguf = "use the safetensors release of the model"sv;
constexpr auto kUnpack = "unpack it first"sv;
constexpr auto kFetch = "fetch the file itself with 'git lfs pull'"sv;
constexpr auto kDownload = "the download failed; fetch the file again"sv;
constexpr auto kNoProgram = "programs have no place in a model directory"sv;

constexpr std::array kSignatures = {
    Signature{"PK\x03\x04"sv, 0, "a zip archive (a PyTorch, Keras or numpy file)", kConvert},
    Signature{"PK\x05\x06"sv, 0, "an empty zip archive", kConvert},
    Signature{"\x80\x02"sv, 0, "a Python pickle", kConvert},
    Signature{"\x80\x03"sv, 0, "a Python pickle", kConvert},
    Signature{"\x80\x04"sv, 0, "a Python pickle", kConvert},
    Signature{"\x80\x05"sv, 0, "a Python pickle", kConvert},
    Signature{"\x89HDF\r\n\x1a\n"sv, 0, "an HDF5 file", kConvert},
    Signature{"\x93NUMPY"sv, 0, "a numpy array", kConvert},
    Signature{"GGUF"sv, 0, "a GGUF file", kConvertGguf},
    Signature{"ggjt"sv, 0, "a GGML file", kConvertGguf},
    Signature{"tjgg"sv, 0, "a GGML file", kConvertGguf},
    Signature{"\x7f"
              "ELF"sv,
              0, "an ELF program or library", kNoProgram},
    Signature{"MZ\x90"sv, 0, "a Windows program or library", kNoProgram},
    Signature{"#!/"sv, 0, "a script", kNoProgram},
    Signature{"ustar"sv, 257, "a tar archive (an old PyTorch file)", kConvert},
    Signature{"\x1f\x8b"sv, 0, "a gzip archive", kUnpack},
    Signature{"\x28\xb5\x2f\xfd"sv, 0, "a zstd archive", kUnpack},
    Signature{"\xfd"
              "7zXZ"sv,
              0, "an xz archive", kUnpack},
    Signature{"version https://git-lfs.github.com/spec"sv, 0, "a Git LFS pointer", kFetch},
    Signature{"<!DOCTYPE html"sv, 0, "an HTML page", kDownload},
    Signature{"<!doctype html"sv, 0, "an HTML page", kDownload},
    Signature{"<html"sv, 0, "an HTML page", kDownload},
};

// Accepts a safetensors header of at most 100 MB: the length's upper bytes are zero and an object
// follows. Some magic numbers are also lengths, so this check goes first.
bool may_be_safetensors(std::string_view start) {
  if (start.size() < 10 || start.substr(4, 4) != "\0\0\0\0"sv) return false;
  return start[8] == '{' || start[8] == ' ' || start[8] == '\n' || start[8] == '\t' ||
         start[8] == '\r';
}

}  // namespace

void refuse_foreign_format(std::span<const std::byte> start, const std::string& file) {
  const std::string_view text(reinterpret_cast<const char*>(start.data()), start.size());
  if (may_be_safetensors(text)) return;
  for (const Signature& signature : kSignatures) {
    if (text.size() < signature.offset + signature.bytes.size()) continue;
    if (text.substr(signature.offset, signature.bytes.size()) != signature.bytes) continue;
    throw Error(ErrorCode::kForbiddenFormat,
                {.what = "the file is " + std::string(signature.format),
                 .file = file,
                 .expected = "safetensors or JSON",
                 .hint = std::string(signature.hint)});
  }
}

}  // namespace conclave::inline v0::io
