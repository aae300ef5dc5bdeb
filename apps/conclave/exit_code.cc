#include "exit_code.h"

namespace conclave::tool {

ExitCode exit_code(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnknownName:
      return ExitCode::kUsage;
    case ErrorCode::kCancelled:
      return ExitCode::kCancelled;
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kFileWrite:
      return ExitCode::kResources;
    case ErrorCode::kInternal:
    case ErrorCode::kNullPointer:
    case ErrorCode::kMisaligned:
    case ErrorCode::kOverlap:
    case ErrorCode::kStride:
    case ErrorCode::kWorkspaceTooSmall:
    case ErrorCode::kState:
    case ErrorCode::kForked:
      return ExitCode::kInternal;
    case ErrorCode::kCommPeerLost:
    case ErrorCode::kCommTimeout:
    case ErrorCode::kCommMismatch:
    case ErrorCode::kCommAborted:
      return ExitCode::kRanks;
    default:
      return ExitCode::kBadInput;
  }
}

}  // namespace conclave::tool
