// A model's trunk is all that it has beside its MoE layers: attention, norms, embeddings, dense
// MLPs. GGUF files and directories of Hugging Face call its tensors and sizes differently.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/gguf.h"
#include "conclave/version.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// How the rows of a tensor lie in the result. A head's rows of a rotated query or key are halves in
// directories, and in some families' files pairs. Files of latent attention have the keys of
// kv_b_proj in one tensor, [head, latent, key], and its values in another, [head, value, latent];
// directories have both in turn, [head * (key + value), latent].
enum class TrunkOrder : uint8_t {
  kSame,
  kPairs,         // rows i and i + n / 2 of a head become 2 i and 2 i + 1
  kHalves,        // the inverse
  kLatentKeys,    // the keys of each head, turned round
  kLatentValues,  // the values of each head
  kLatentBoth,    // keys of the first source, turned round, and values of the second
};

struct TrunkTensorInfo {
  std::string name;
  std::vector<int64_t> shape;  // the length of a row is last
};

struct TrunkTensor {
  std::string name;                  // in the result
  std::vector<std::string> sources;  // two for kLatentBoth, else one
  std::vector<int64_t> shape;        // in the result
  TrunkOrder order = TrunkOrder::kSame;
  int64_t heads = 1;  // for all orders but kSame
  int64_t keys = 0;   // rows of a head that are keys, for the latent orders
};

struct ModelTrunk {
  // No, with the reason, if the result would be no whole model: then there is nothing else.
  Support support = Support::yes();
  std::vector<TrunkTensor> tensors = {};
  // Tensors of the source that neither kind of result has, such as those of multi-token prediction.
  std::vector<std::string> left_out = {};
  std::vector<GgufKey> keys = {};  // a GGUF file has them beside those of gguf_layers
  std::string config = {};         // the text of config.json that a directory gets
};

// The trunk of a model directory by llama.cpp's names. `config` is the text of config.json,
// `tensors` are all of the model's, and `layer_keys` those that gguf_layers returns: none is stated
// twice.
CONCLAVE_API ModelTrunk gguf_trunk(const Checkpoint& model, std::string_view config,
                                   std::span<const TrunkTensorInfo> tensors,
                                   std::span<const GgufKey> layer_keys);

// The trunk of a GGUF file by the names of a family, which directory_layers chose with the
// configuration `config`; the result's states the trunk too. Throws Error(kFileRead).
CONCLAVE_API ModelTrunk directory_trunk(const Checkpoint& model, std::string_view model_type,
                                        std::string_view config,
                                        std::span<const TrunkTensorInfo> tensors);

}  // namespace conclave::inline v0
