// One layer of a Hugging Face model directory on rows of its own: the C++ of README.md's first
// page, whose lines stand between the two marks below.
#include <conclave/conclave.h>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

namespace {

int run(const char* directory) {
  // README.md: begin
  const auto checkpoint = conclave::Checkpoint::open(directory);
  const auto source = checkpoint.layer_source(0);
  const auto& spec = checkpoint.layer(0).spec;

  const conclave::Context context;
  const auto layer = conclave::MoeLayer::create(context, spec, *source);

  const int64_t tokens = 3;
  std::vector<float> hidden(size_t(tokens * spec.hidden_size), 0.5f);
  std::vector<float> out(hidden.size());
  layer.forward({.hidden = {hidden.data(), conclave::DType::kF32, {tokens, spec.hidden_size}},
                 .out = {out.data(), conclave::DType::kF32, {tokens, spec.hidden_size}}});
  // README.md: end

  // Equal rows have equal results, and these are no zeros.
  const auto size = static_cast<size_t>(spec.hidden_size);
  double sum = 0;
  for (size_t i = 0; i < size; ++i) {
    if (out[i] != out[size + i] || out[i] != out[2 * size + i]) return 1;
    sum += out[i] * out[i];
  }
  std::printf("%s: %s\n", checkpoint.model_type().c_str(), sum > 0 ? "ok" : "nothing but zeros");
  return sum > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: first_layer MODEL_DIR\n");
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
