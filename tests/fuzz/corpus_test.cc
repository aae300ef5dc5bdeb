// Replays the fuzzers' corpora in builds without a fuzzer: other compilers, other optimisation.
#include "fuzz/harness.h"
#include "io/io_test_support.h"
#include "support/in_sample.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace conclave::testing {
namespace {

// Runs every file, and every prefix of the small ones.
void replay(const std::string& name, void (*harness)(std::span<const std::byte>)) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("tests/fuzz/corpus/" + name)) {
    SCOPED_TRACE(entry.path());
    const std::string input = read_file(entry.path());
    harness(bytes_of(input));
    for (size_t bytes = 0; input.size() <= 512 && bytes < input.size(); ++bytes) {
      if (!in_sample(bytes + files, 8)) continue;
      harness(bytes_of(input).first(bytes));
    }
    ++files;
  }
  EXPECT_GE(files, 10U);
}

TEST(FuzzCorpus, SafetensorsHeader_Replays) {
  replay("safetensors_header", fuzz_safetensors_header);
}
TEST(FuzzCorpus, GgufHeader_Replays) { replay("gguf_header", fuzz_gguf_header); }
TEST(FuzzCorpus, Index_Replays) { replay("index", fuzz_index); }
TEST(FuzzCorpus, Config_Replays) { replay("config", fuzz_config); }
TEST(FuzzCorpus, PackedWeights_Replays) { replay("packed_weights", fuzz_packed_weights); }
TEST(FuzzCorpus, GgufBlocks_Replays) { replay("gguf_blocks", fuzz_gguf_blocks); }
TEST(FuzzCorpus, SentencePieceModel_Replays) {
  replay("sentencepiece_model", fuzz_sentencepiece_model);
}
TEST(FuzzCorpus, RoutingTrace_Replays) { replay("routing_trace", fuzz_routing_trace); }

}  // namespace
}  // namespace conclave::testing
