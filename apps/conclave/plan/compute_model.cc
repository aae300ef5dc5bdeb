#include "plan/compute_model.h"

#include "conclave/dtype.h"

#include <algorithm>
#include <array>

namespace conclave::tool {
namespace {

// Rows that share one reading of an expert's decoded weights.
constexpr double kTileRows = 128;

struct Shares {
  ProductFacts facts;
  double start_us = 0;     // launches, and what precedes the first product
  double memory = 0;       // share of the memory's rate
  double products = 0;     // share of the peak
  double extra_rows = 0;   // computed for each expert beyond its own: tiles are seldom full
  double exposed = 0;      // the part of the lesser of reading and multiplying that is not hidden
  double rows = 0;         // share of the memory's rate for rows beside weights
  double decode_tera = 0;  // weights decoded in a second, 1e12; 0: nothing is decoded
  double Cluster::*peak;
};

// In the order of ProductKind.
const std::array kShares = {Shares{.facts = {"16-bit values", true, 0.13, 0.02},
                                   .start_us = 12.0,
                                   .memory = 1.0,
                                   .products = 0.721,
                                   .extra_rows = 16.7,
                                   .exposed = 0.424,
                                   .rows = 0.473,
                                   .peak = &Cluster::tensor16_tflops},
                            Shares{.facts = {"8-bit rows and weights", true, 0.09, 0.022},
                                   .start_us = 15.6,
                                   .memory = 1.0,
                                   .products = 0.619,
                                   .extra_rows = 14.8,
                                   .exposed = 0.522,
                                   .rows = 0.516,
                                   .peak = &Cluster::tensor8_tflops},
                            Shares{.facts = {"codes decoded to 16 bits", true, 0.29, 0.07},
                                   .start_us = 25.1,
                                   .memory = 0.781,
                                   .products = 0.757,
                                   .extra_rows = 0,
                                   .exposed = 1.0,
                                   .rows = 0.439,
                                   .decode_tera = 27,
                                   .peak = &Cluster::tensor16_tflops},
                            Shares{.facts = {"float32", false, 0, 0},
                                   .start_us = 20,
                                   .memory = 0.8,
                                   .products = 0.5,
                                   .extra_rows = 8,
                                   .exposed = 0.5,
                                   .rows = 0.5,
                                   .peak = &Cluster::float32_tflops}};

// 1e12 a second are 1e6 a microsecond.
constexpr double kTera = 1e6;

const Shares& shares_of(ProductKind kind) { return kShares[static_cast<size_t>(kind)]; }

}  // namespace

ProductKind product_kind(const MoeSpec& spec) {
  const bool plain = spec.quant.weights == WeightScale::kNone;
  const int bits = static_cast<int>(bit_size(spec.weight_dtype));
  if (plain && bits == 32) return ProductKind::kFloat32;
  if (plain && bits == 16) return ProductKind::kValues16;
  const bool rows_are_bytes = spec.quant.activations != ActivationScale::kNone;
  return rows_are_bytes && bits == 8 ? ProductKind::kBytes : ProductKind::kCodes;
}

const ProductFacts& product_facts(ProductKind kind) { return shares_of(kind).facts; }

ExpertSize expert_size(const MoeSpec& spec, int64_t hidden, double intermediate, bool gated,
                       double bytes) {
  const double width = static_cast<double>(hidden);
  const double input_bytes = spec.quant.activations == ActivationScale::kNone ? 2 : 1;
  return {.elements = (gated ? 3 : 2) * width * intermediate,
          .bytes = bytes,
          // A row is read and its result written, 16 bits each; so is the intermediate row.
          .row_bytes = width * (input_bytes + 2) + intermediate * 4};
}

void ExpertWork::add(const ExpertSize& size, double rows) {
  if (!(rows > 0)) return;
  bytes_ += size.bytes;
  operations_ += 2 * size.elements * rows;
  expert_operations_ += 2 * size.elements;
  tile_elements_ += size.elements * (std::max(rows / kTileRows, 1.0) - 1);
  row_bytes_ += size.row_bytes * rows;
}

double ExpertWork::microseconds(const Cluster& cluster, ProductKind kind) const {
  const Shares& shares = shares_of(kind);
  const double memory_rate = cluster.memory_tbps * kTera;
  const double reading = bytes_ / (shares.memory * memory_rate);
  double multiplying = (operations_ + shares.extra_rows * expert_operations_) /
                       (shares.products * cluster.*shares.peak * kTera);
  if (shares.decode_tera > 0) {
    // Decoding runs at the speed of the chip, for which its products stand.
    const double speed = cluster.*shares.peak / 989;
    multiplying += tile_elements_ / (shares.decode_tera * speed * kTera);
  }
  return shares.start_us + std::max(reading, multiplying) +
         shares.exposed * std::min(reading, multiplying) + row_bytes_ / (shares.rows * memory_rate);
}

}  // namespace conclave::tool
