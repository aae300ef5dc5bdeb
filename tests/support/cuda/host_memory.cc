// Gives a test that has no GPU the host's memory for the device's: copies are made at once, events
// have always passed, codes are arranged here, and planes hashed. The linker gives a wrapped
// function's calls to
// __wrap_.

#include "support/cuda/host_memory.h"

#include "experts/cuda/lane_codes.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_runtime_api.h>

namespace {
bool is_captured = false;
}

void conclave::testing::set_captured(bool captured) { is_captured = captured; }

namespace {

// Codes of 2 bits, 64 columns at a time.
void arrange_small(void* codes, int64_t bytes) {
  constexpr int32_t kColumns = conclave::experts::kLaneColumns;
  for (int64_t at = 0; at < bytes; at += kColumns / 4) {
    std::array<uint8_t, kColumns / 4> stored = {};
    std::array<uint32_t, kColumns / 16> words = {};
    std::memcpy(stored.data(), static_cast<char*>(codes) + at, stored.size());
    for (int32_t column = 0; column < kColumns; ++column) {
      const uint32_t code = stored[static_cast<size_t>(column / 4)] >> (column % 4 * 2) & 3U;
      words[static_cast<size_t>(conclave::experts::small_lane_word(column))] |=
          code << conclave::experts::small_lane_bit(column);
    }
    std::memcpy(static_cast<char*>(codes) + at, words.data(), stored.size());
  }
}

}  // namespace

extern "C" {

cudaError_t __wrap_cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t __wrap_cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t __wrap_cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t __wrap_cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) {
    std::memcpy(static_cast<char*>(to) + row * to_pitch,
                static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t __wrap_cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t __wrap_cudaPointerGetAttributes(cudaPointerAttributes* at, const void*) {
  *at = {};
  return cudaSuccess;
}
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
cudaError_t __wrap_cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t __wrap_cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t __wrap_cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t __wrap_cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t __wrap_cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t __wrap_cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t __wrap_cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t __wrap_cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
cudaError_t __wrap_cudaDeviceSynchronize() {
  return is_captured ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t __wrap_cudaGetDevice(int* ordinal) {
  *ordinal = 0;
  return cudaSuccess;
}
cudaError_t __wrap_cudaSetDevice(int) { return cudaSuccess; }

// experts::arrange_codes, whose kernel needs a GPU.
void __wrap__ZN8conclave2v07experts13arrange_codesEPvllNS1_9CodeOrderEP11CUstream_st(
    void* codes, int64_t rows, int64_t row_bytes, conclave::experts::CodeOrder order,
    CUstream_st*) {
  using conclave::experts::CodeOrder;
  if (order == CodeOrder::kStored) return;
  if (order == CodeOrder::kLanesOfSmallNumbers) return arrange_small(codes, rows * row_bytes);
  const auto bits =
      order == CodeOrder::kLanesOfNumbers ? conclave::experts::lane_bits<CodeOrder::kLanesOfNumbers>
      : order == CodeOrder::kLanesOfPairs ? conclave::experts::lane_bits<CodeOrder::kLanesOfPairs>
                                          : conclave::experts::lane_bits<CodeOrder::kLanesOfFloats>;
  constexpr int32_t kColumns = conclave::experts::kLaneColumns;
  for (int64_t at = 0; at < rows * row_bytes; at += kColumns / 2) {
    std::array<uint8_t, kColumns / 2> stored = {};
    std::array<uint32_t, kColumns / 8> words = {};
    std::memcpy(stored.data(), static_cast<char*>(codes) + at, stored.size());
    for (int32_t column = 0; column < kColumns; ++column) {
      const auto place = conclave::experts::lane_place(column);
      const uint32_t code = stored[static_cast<size_t>(column / 2)] >> (column % 2 * 4) & 0xfU;
      words[static_cast<size_t>(place.word)] |= bits(place, code);
    }
    std::memcpy(static_cast<char*>(codes) + at, words.data(), stored.size());
  }
}

// add_plane_hash, likewise.
void __wrap__ZN8conclave2v014add_plane_hashEPKSt4bytemmPmP11CUstream_st(const std::byte* data,
                                                                        size_t bytes, uint64_t seed,
                                                                        uint64_t* sum,
                                                                        CUstream_st*) {
  for (size_t at = 0; at < bytes; ++at) {
    uint64_t mixed = (std::to_integer<uint64_t>(data[at]) + 1) * 0x9E3779B97F4A7C15U ^ (seed + at);
    mixed = (mixed ^ (mixed >> 29U)) * 0xBF58476D1CE4E5B9U;
    *sum += mixed ^ (mixed >> 32U);
  }
}

}  // extern "C"
