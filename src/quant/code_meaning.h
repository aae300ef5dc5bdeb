// Scales of matrices of codes and of the rows they multiply: read from a source, checked, widened.
#pragma once

#include "conclave/error.h"
#include "conclave/spec.h"
#include "conclave/weights.h"

#include <cstdint>
#include <vector>

namespace conclave::inline v0 {

// Loads a block of a plane of scales as float32, dense. Throws Error(kTensorValue) naming the
// tensor for a scale that is NaN or infinite, or negative where they have no signs.
std::vector<float> load_scales(const QuantSpec& quant, const WeightSource& source, WeightId id,
                               int64_t expert, const WeightBlock& block);

// These numbers give the codes of some rows of a matrix a meaning: w = code * scale - offset. Zero
// points are offsets in units of a scale, and the global scale is in `scales`: products in float32.
struct CodeMeaning {
  int64_t groups = 0;  // neighbouring columns share a scale, or those of one number in `order`
  std::vector<float> scales;   // [rows, groups]; [rows of blocks, groups] if loaded as stored
  std::vector<float> offsets;  // likewise; empty without WeightZero
  std::vector<int32_t> order;  // [cols]: the group of each column; empty where they are neighbours
  std::vector<float> factors;  // [cols]: what the rows are multiplied by; empty without factors
};
// Loads it for a block of the matrix, row by row: [rows, 1], or with WeightScale::kBlock one for
// each block of scales that the columns touch; all of a row's if columns have an order. Throws
// Error(kTensorValue) as load_scales does, for offsets, orders and factors that mean nothing, and
// for factors of up that are not those of gate.
CodeMeaning load_meaning(const QuantSpec& quant, const WeightSource& source, WeightId matrix,
                         int64_t expert, const WeightBlock& block);
// Loads the same, but once for the rows of a block of WeightScale::kBlock, and once for all of
// kTensor.
CodeMeaning load_meaning_as_stored(const QuantSpec& quant, const WeightSource& source,
                                   WeightId matrix, int64_t expert, const WeightBlock& block);

// Throws what load_meaning would throw. Scales of a byte are not widened for that.
void check_meaning(const QuantSpec& quant, const WeightSource& source, WeightId matrix,
                   int64_t expert, const WeightBlock& block);

// Loads the order, or the factors, of a block's columns alone, as load_meaning does.
std::vector<int32_t> load_column_order(const QuantSpec& quant, const WeightSource& source,
                                       WeightId matrix, int64_t expert, const WeightBlock& block);
std::vector<float> load_column_factors(const QuantSpec& quant, const WeightSource& source,
                                       WeightId matrix, int64_t expert, const WeightBlock& block);

// The steps of rows that a checkpoint states, for all experts of a kind: the largest over experts,
// and over gate and up. Throws Error(kTensorValue) for one that is not finite and positive.
struct StaticScales {
  float input = 1;
  float intermediate = 1;
};
StaticScales load_static_scales(const WeightSource& source, WeightMlp mlp);

}  // namespace conclave::inline v0
