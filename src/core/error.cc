#include "conclave/error.h"

#include "core/dcheck.h"

#include <array>
#include <utility>

namespace conclave::inline v0 {
namespace {

struct CodeName {
  ErrorCode code;
  std::string_view name;
};

constexpr std::array kCodeNames = {
    CodeName{ErrorCode::kInvalidArgument, "kInvalidArgument"},
    CodeName{ErrorCode::kNullPointer, "kNullPointer"},
    CodeName{ErrorCode::kMisaligned, "kMisaligned"},
    CodeName{ErrorCode::kOverlap, "kOverlap"},
    CodeName{ErrorCode::kShape, "kShape"},
    CodeName{ErrorCode::kDType, "kDType"},
    CodeName{ErrorCode::kStride, "kStride"},
    CodeName{ErrorCode::kDevice, "kDevice"},
    CodeName{ErrorCode::kExpertId, "kExpertId"},
    CodeName{ErrorCode::kSizeOverflow, "kSizeOverflow"},
    CodeName{ErrorCode::kUnknownName, "kUnknownName"},
    CodeName{ErrorCode::kWorkspaceTooSmall, "kWorkspaceTooSmall"},
    CodeName{ErrorCode::kState, "kState"},
    CodeName{ErrorCode::kUnsupported, "kUnsupported"},
    CodeName{ErrorCode::kOutOfMemory, "kOutOfMemory"},
    CodeName{ErrorCode::kForked, "kForked"},
    CodeName{ErrorCode::kCancelled, "kCancelled"},
    CodeName{ErrorCode::kInternal, "kInternal"},
    CodeName{ErrorCode::kFileNotFound, "kFileNotFound"},
    CodeName{ErrorCode::kFileAccess, "kFileAccess"},
    CodeName{ErrorCode::kFileNotRegular, "kFileNotRegular"},
    CodeName{ErrorCode::kFileRead, "kFileRead"},
    CodeName{ErrorCode::kFileWrite, "kFileWrite"},
    CodeName{ErrorCode::kFileChanged, "kFileChanged"},
    CodeName{ErrorCode::kPathEscape, "kPathEscape"},
    CodeName{ErrorCode::kForbiddenFormat, "kForbiddenFormat"},
    CodeName{ErrorCode::kSafetensorsTooShort, "kSafetensorsTooShort"},
    CodeName{ErrorCode::kSafetensorsHeaderTooLarge, "kSafetensorsHeaderTooLarge"},
    CodeName{ErrorCode::kSafetensorsHeaderTruncated, "kSafetensorsHeaderTruncated"},
    CodeName{ErrorCode::kSafetensorsUtf8, "kSafetensorsUtf8"},
    CodeName{ErrorCode::kSafetensorsJson, "kSafetensorsJson"},
    CodeName{ErrorCode::kSafetensorsNotObject, "kSafetensorsNotObject"},
    CodeName{ErrorCode::kSafetensorsMetadata, "kSafetensorsMetadata"},
    CodeName{ErrorCode::kSafetensorsDuplicateKey, "kSafetensorsDuplicateKey"},
    CodeName{ErrorCode::kSafetensorsName, "kSafetensorsName"},
    CodeName{ErrorCode::kSafetensorsEntry, "kSafetensorsEntry"},
    CodeName{ErrorCode::kSafetensorsDType, "kSafetensorsDType"},
    CodeName{ErrorCode::kSafetensorsShape, "kSafetensorsShape"},
    CodeName{ErrorCode::kSafetensorsInteger, "kSafetensorsInteger"},
    CodeName{ErrorCode::kSafetensorsSizeOverflow, "kSafetensorsSizeOverflow"},
    CodeName{ErrorCode::kSafetensorsSubByte, "kSafetensorsSubByte"},
    CodeName{ErrorCode::kSafetensorsOffsets, "kSafetensorsOffsets"},
    CodeName{ErrorCode::kSafetensorsSizeMismatch, "kSafetensorsSizeMismatch"},
    CodeName{ErrorCode::kSafetensorsHole, "kSafetensorsHole"},
    CodeName{ErrorCode::kSafetensorsOverlap, "kSafetensorsOverlap"},
    CodeName{ErrorCode::kSafetensorsTruncatedData, "kSafetensorsTruncatedData"},
    CodeName{ErrorCode::kSafetensorsTrailingData, "kSafetensorsTrailingData"},
    CodeName{ErrorCode::kSafetensorsTooManyTensors, "kSafetensorsTooManyTensors"},
    CodeName{ErrorCode::kGgufMagic, "kGgufMagic"},
    CodeName{ErrorCode::kGgufVersion, "kGgufVersion"},
    CodeName{ErrorCode::kGgufTruncatedHeader, "kGgufTruncatedHeader"},
    CodeName{ErrorCode::kGgufCount, "kGgufCount"},
    CodeName{ErrorCode::kGgufString, "kGgufString"},
    CodeName{ErrorCode::kGgufKey, "kGgufKey"},
    CodeName{ErrorCode::kGgufValueType, "kGgufValueType"},
    CodeName{ErrorCode::kGgufBool, "kGgufBool"},
    CodeName{ErrorCode::kGgufArray, "kGgufArray"},
    CodeName{ErrorCode::kGgufDuplicateKey, "kGgufDuplicateKey"},
    CodeName{ErrorCode::kGgufAlignment, "kGgufAlignment"},
    CodeName{ErrorCode::kGgufName, "kGgufName"},
    CodeName{ErrorCode::kGgufShape, "kGgufShape"},
    CodeName{ErrorCode::kGgufTensorType, "kGgufTensorType"},
    CodeName{ErrorCode::kGgufSizeOverflow, "kGgufSizeOverflow"},
    CodeName{ErrorCode::kGgufDuplicateTensor, "kGgufDuplicateTensor"},
    CodeName{ErrorCode::kGgufOffset, "kGgufOffset"},
    CodeName{ErrorCode::kGgufTruncatedData, "kGgufTruncatedData"},
    CodeName{ErrorCode::kGgufTrailingData, "kGgufTrailingData"},
    CodeName{ErrorCode::kGgufSplit, "kGgufSplit"},
    CodeName{ErrorCode::kJsonSyntax, "kJsonSyntax"},
    CodeName{ErrorCode::kJsonTooLarge, "kJsonTooLarge"},
    CodeName{ErrorCode::kJsonTooDeep, "kJsonTooDeep"},
    CodeName{ErrorCode::kJsonDuplicateKey, "kJsonDuplicateKey"},
    CodeName{ErrorCode::kJsonType, "kJsonType"},
    CodeName{ErrorCode::kIndexNoWeightMap, "kIndexNoWeightMap"},
    CodeName{ErrorCode::kIndexShardMissing, "kIndexShardMissing"},
    CodeName{ErrorCode::kIndexTensorMissing, "kIndexTensorMissing"},
    CodeName{ErrorCode::kIndexTensorUnlisted, "kIndexTensorUnlisted"},
    CodeName{ErrorCode::kConfigMissingKey, "kConfigMissingKey"},
    CodeName{ErrorCode::kConfigValue, "kConfigValue"},
    CodeName{ErrorCode::kUnknownArchitecture, "kUnknownArchitecture"},
    CodeName{ErrorCode::kUnsupportedQuantization, "kUnsupportedQuantization"},
    CodeName{ErrorCode::kTuningSyntax, "kTuningSyntax"},
    CodeName{ErrorCode::kTuningVersion, "kTuningVersion"},
    CodeName{ErrorCode::kTokenizerModel, "kTokenizerModel"},
    CodeName{ErrorCode::kTensorMissing, "kTensorMissing"},
    CodeName{ErrorCode::kTensorUnexpected, "kTensorUnexpected"},
    CodeName{ErrorCode::kTensorDuplicate, "kTensorDuplicate"},
    CodeName{ErrorCode::kTensorShape, "kTensorShape"},
    CodeName{ErrorCode::kTensorDType, "kTensorDType"},
    CodeName{ErrorCode::kLayerNotFound, "kLayerNotFound"},
    CodeName{ErrorCode::kChecksum, "kChecksum"},
    CodeName{ErrorCode::kTensorValue, "kTensorValue"},
    CodeName{ErrorCode::kCommPeerLost, "kCommPeerLost"},
    CodeName{ErrorCode::kCommTimeout, "kCommTimeout"},
    CodeName{ErrorCode::kCommMismatch, "kCommMismatch"},
    CodeName{ErrorCode::kCommAborted, "kCommAborted"},
    CodeName{ErrorCode::kCommExcluded, "kCommExcluded"},
};

void append_field(std::string& text, std::string_view label, const std::string& value) {
  if (value.empty()) return;
  text += "; ";
  text += label;
  text += ' ';
  text += value;
}

// Returns "file: tensor: sentence; expected ...; found ...; limit ...; hint".
std::string compose(const ErrorDetail& detail) {
  std::string text;
  for (const std::string* part : {&detail.file, &detail.tensor}) {
    if (!part->empty()) text += *part + ": ";
  }
  text += detail.what;
  append_field(text, "expected", detail.expected);
  append_field(text, "found", detail.found);
  append_field(text, "limit", detail.limit);
  if (!detail.hint.empty()) text += " (" + detail.hint + ")";
  return text;
}

}  // namespace

std::string_view to_string(ErrorCode code) noexcept {
  for (const CodeName& entry : kCodeNames) {
    if (entry.code == code) return entry.name;
  }
  return "unknown";
}

Error::Error(ErrorCode code, ErrorDetail detail)
    : std::runtime_error(compose(detail)), code_(code), detail_(std::move(detail)) {}

CommError::CommError(ErrorCode code, int32_t peer, std::string phase, std::string what)
    : Error(code, ErrorDetail{.what = (peer >= 0 ? "rank " + std::to_string(peer) + ", " : "") +
                                      "phase " + phase + ": " + std::move(what)}),
      peer_(peer),
      phase_(std::move(phase)) {}

void dcheck_failed(const char* condition, const char* file, int line) {
  throw Error(ErrorCode::kInternal, std::string("broken invariant ") + condition + " at " + file +
                                        ":" + std::to_string(line));
}

}  // namespace conclave::inline v0
