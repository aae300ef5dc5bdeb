// The one exception type of the library, with stable codes, and `Support` for "cannot, because".
#pragma once

#include "conclave/version.h"

#include <concepts>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::inline v0 {

// Numeric values are stable across versions; docs/errors.md lists each with its cause and remedy.
enum class ErrorCode : int32_t {
  // 1xx: arguments of a call
  kInvalidArgument = 100,
  kNullPointer = 101,
  kMisaligned = 102,
  kOverlap = 103,
  kShape = 104,
  kDType = 105,
  kStride = 106,
  kDevice = 107,
  kExpertId = 108,      // id outside [0, E) other than -1 under IdPolicy::kStrict
  kSizeOverflow = 109,  // a product of sizes does not fit 64 bits
  kUnknownName = 110,   // no row of that name in a catalog
  kWorkspaceTooSmall = 111,
  kState = 112,        // e.g. forward on a layer whose in-place reload failed
  kUnsupported = 113,  // no kernel row supports the problem; text lists the reasons
  kOutOfMemory = 114,
  kForked = 115,     // used in a forked child
  kCancelled = 116,  // the caller, or its user, has ended the work
  kInternal = 199,   // a bug in this library

  // 2xx: files
  kFileNotFound = 200,
  kFileAccess = 201,
  kFileNotRegular = 202,
  kFileRead = 203,
  kFileWrite = 204,
  kFileChanged = 205,      // size or identity changed while it was being read
  kPathEscape = 206,       // a shard name that is not one plain path component
  kForbiddenFormat = 207,  // pickle, zip, HDF5, numpy, ... recognised by content

  // 3xx: safetensors, one code per rule
  kSafetensorsTooShort = 300,
  kSafetensorsHeaderTooLarge = 301,
  kSafetensorsHeaderTruncated = 302,
  kSafetensorsUtf8 = 303,
  kSafetensorsJson = 304,
  kSafetensorsNotObject = 305,
  kSafetensorsMetadata = 306,
  kSafetensorsDuplicateKey = 307,
  kSafetensorsName = 308,
  kSafetensorsEntry = 309,  // a tensor entry lacks or repeats dtype, shape, data_offsets
  kSafetensorsDType = 310,
  kSafetensorsShape = 311,
  kSafetensorsInteger = 312,  // not a plain non-negative 64-bit integer
  kSafetensorsSizeOverflow = 313,
  kSafetensorsSubByte = 314,       // bit size not a whole number of bytes
  kSafetensorsOffsets = 315,       // begin > end, or beyond the file
  kSafetensorsSizeMismatch = 316,  // end - begin differs from shape x dtype
  kSafetensorsHole = 317,
  kSafetensorsOverlap = 318,
  kSafetensorsTruncatedData = 319,  // data section shorter than the offsets say
  kSafetensorsTrailingData = 320,
  kSafetensorsTooManyTensors = 321,

  // 35x to 37x: GGUF, one code per rule
  kGgufMagic = 350,
  kGgufVersion = 351,  // neither 2 nor 3, or big-endian
  kGgufTruncatedHeader = 352,
  kGgufCount = 353,   // more keys or tensors than the file can hold
  kGgufString = 354,  // a length beyond the file or our limit
  kGgufKey = 355,
  kGgufValueType = 356,
  kGgufBool = 357,
  kGgufArray = 358,  // longer than the file, or nested
  kGgufDuplicateKey = 359,
  kGgufAlignment = 360,
  kGgufName = 361,
  kGgufShape = 362,  // more than 4 dimensions, one that is 0, or a row of part of a block
  kGgufTensorType = 363,
  kGgufSizeOverflow = 364,
  kGgufDuplicateTensor = 365,
  kGgufOffset = 366,         // not behind the tensor before
  kGgufTruncatedData = 367,  // a tensor ends beyond the file
  kGgufTrailingData = 368,
  kGgufSplit = 369,  // parts that do not make one model

  // 4xx: JSON documents (config.json, index)
  kJsonSyntax = 400,
  kJsonTooLarge = 401,
  kJsonTooDeep = 402,
  kJsonDuplicateKey = 403,
  kJsonType = 404,
  kIndexNoWeightMap = 410,
  kIndexShardMissing = 411,
  kIndexTensorMissing = 412,   // the index names a tensor that its shard does not hold
  kIndexTensorUnlisted = 413,  // a shard holds a tensor that the index does not name
  kConfigMissingKey = 420,
  kConfigValue = 421,
  kUnknownArchitecture = 422,
  kUnsupportedQuantization = 423,

  kTuningSyntax = 430,   // a line of a tuning table
  kTuningVersion = 431,  // written by another version

  kTokenizerModel = 440,  // a tokenizer.model that is no model of SentencePiece

  // 5xx: model content
  kTensorMissing = 500,
  kTensorUnexpected = 501,
  kTensorDuplicate = 502,  // two tensors fill the same role
  kTensorShape = 503,
  kTensorDType = 504,
  kLayerNotFound = 505,
  kChecksum = 506,
  kTensorValue = 507,  // a scale that is not finite, or negative

  // 7xx: communication
  kCommPeerLost = 700,
  kCommTimeout = 701,
  kCommMismatch = 702,  // ranks disagree on sizes, types or plan
  kCommAborted = 703,
  kCommExcluded = 704,  // came to survivors() after the others had gone on
};

// "kShape" for ErrorCode::kShape; "unknown" for a value outside the list.
CONCLAVE_API std::string_view to_string(ErrorCode code) noexcept;

// A field that does not apply is empty.
struct ErrorDetail {
  std::string what = {};  // the sentence that says what was wrong, in the caller's words
  std::string file = {};
  std::string tensor = {};  // tensor or argument name
  std::string expected = {};
  std::string found = {};
  std::string limit = {};
  std::string hint = {};  // the next step for the caller
};

class CONCLAVE_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, ErrorDetail detail);
  // A template, so that a braced detail of two fields is never taken for a string's iterators.
  template <class Text>
    requires std::convertible_to<Text, std::string>
  Error(ErrorCode code, const Text& what) : Error(code, ErrorDetail{.what = std::string(what)}) {}

  ErrorCode code() const noexcept { return code_; }
  const ErrorDetail& detail() const noexcept { return detail_; }

 private:
  ErrorCode code_;
  ErrorDetail detail_;
};

// A lost, late or disagreeing rank. `peer` is -1 if no single peer is to blame.
class CONCLAVE_API CommError : public Error {
 public:
  CommError(ErrorCode code, int32_t peer, std::string phase, std::string what);

  int32_t peer() const noexcept { return peer_; }
  const std::string& phase() const noexcept { return phase_; }

 private:
  int32_t peer_;
  std::string phase_;
};

// The answer of a capability check: empty means yes, otherwise the reason why not.
class [[nodiscard]] Support {
 public:
  static Support yes() { return Support(); }
  static Support no(std::string reason) { return Support(std::move(reason)); }

  explicit operator bool() const noexcept { return !reason_.has_value(); }
  const std::string& reason() const noexcept {
    static const std::string kNone;
    return reason_ ? *reason_ : kNone;
  }

 private:
  Support() = default;
  explicit Support(std::string reason) : reason_(std::move(reason)) {}
  std::optional<std::string> reason_;
};

}  // namespace conclave::inline v0
