// How long the experts of one GPU take, by the rows that each of them has: reading weights and
// multiplying overlap, rows are read and written beside. The shares of a GPU's rates were fitted to
// whole layers on one H200, from ids and weights to the output (bench/results/h200).
#pragma once

#include "plan/cluster.h"

#include "conclave/spec.h"

#include <cstdint>
#include <string_view>

namespace conclave::tool {

// How kernels multiply, by which they reach different shares of the rates.
enum class ProductKind : uint8_t {
  kValues16,  // bf16 and f16
  kBytes,     // 8-bit rows beside 8-bit weights
  kCodes,     // codes that are decoded for rows of 16 bits
  kFloat32,
};
ProductKind product_kind(const MoeSpec& spec);

struct ProductFacts {
  std::string_view name;
  bool measured = false;  // false: the shares are assumed
  // The largest and the mean relative error of a prediction against any of the measured layers.
  double worst_error = 0;
  double mean_error = 0;
};
const ProductFacts& product_facts(ProductKind kind);

// One expert, or the slice of it that a GPU holds.
struct ExpertSize {
  double elements = 0;   // in all its matrices
  double bytes = 0;      // its weights, scales included
  double row_bytes = 0;  // read and written for a row beside the weights
};
ExpertSize expert_size(const MoeSpec& spec, int64_t hidden, double intermediate, bool gated,
                       double bytes);

// The work of one GPU.
class ExpertWork {
 public:
  // An expert with so many rows; none do not count.
  void add(const ExpertSize& size, double rows);

  // Without any work it is what the launches take.
  double microseconds(const Cluster& cluster, ProductKind kind) const;

 private:
  double bytes_ = 0;              // weights that are read
  double operations_ = 0;         // what rows take
  double expert_operations_ = 0;  // what one more row of each expert takes
  double tile_elements_ = 0;      // weights that are decoded again for further rows
  double row_bytes_ = 0;
};

}  // namespace conclave::tool
