// libFuzzer's entry point; CONCLAVE_HARNESS is the harness that this executable feeds.
#include "fuzz/harness.h"

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  conclave::testing::CONCLAVE_HARNESS(std::as_bytes(std::span(data, size)));
  return 0;
}
