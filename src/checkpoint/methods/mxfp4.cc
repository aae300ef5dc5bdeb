// The method "mxfp4": stacks of blocks of 32 e2m1 codes, 16 bytes each, and an exponent a block.
#include "checkpoint/methods/config.h"
#include "checkpoint/methods/methods.h"
#include "checkpoint/methods/shared_planes.h"
#include "core/checked.h"

#include <nlohmann/json.hpp>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr int64_t kBlock = 32;
constexpr int64_t kBlockBytes = kBlock / 2;

StoredShapes block_shapes(const MatrixForm& form) {
  return {{form.rows, ceil_div(form.cols, kBlock), kBlockBytes},
          {form.rows, ceil_div(form.cols, kBlock) * kBlockBytes}};
}
bool fills_blocks(const MatrixForm& form) { return form.cols % kBlock == 0; }

// The last block of a row may have codes beyond its end.
void decode_blocks(const MatrixForm& form, std::span<const PlaneInput> inputs,
                   std::span<std::byte> plane) {
  decode_pairs_of(form, ceil_div(form.cols, kBlock) * kBlockBytes, inputs[0].bytes, plane);
}

constexpr std::array kPlanes = {
    StoredPlane{.suffix = "_blocks",
                .ending = "",
                .types = kByteTypes,
                .shapes = block_shapes,
                .decode = decode_blocks,
                .lies_in_place = fills_blocks},
    exponents("_scales", ""),
};

}  // namespace

QuantizedWeights read_mxfp4(const io::JsonValue&) {
  QuantizedWeights weights{.element = DType::kF4, .planes = kPlanes};
  set_block(weights.spec, 1, kBlock);
  return weights;
}

std::string write_mxfp4(const MethodForm& form, const std::vector<std::string>& kept) {
  const nlohmann::ordered_json config = {{"quant_method", form.method},
                                         {"modules_to_not_convert", kept}};
  return config.dump();
}

}  // namespace conclave::inline v0::checkpoint
