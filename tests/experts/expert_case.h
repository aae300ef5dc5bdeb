// A random experts problem, its float64 answer, and a way to run any kernel row on it.
#pragma once

#include "core/float_convert.h"
#include "cpu/isa.h"
#include "experts/experts_kernel.h"
#include "experts/quantize_rows.h"
#include "support/executors.h"
#include "support/tolerance.h"

#include "conclave/context.h"
#include "conclave/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace conclave::testing {

struct CaseShape {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  DType weights = DType::kBF16;
  std::vector<int64_t> rows_per_expert;
  uint64_t seed = 1;
};

inline std::string describe(const CaseShape& shape) {
  std::string text = std::string(to_string(shape.weights)) +
                     " H=" + std::to_string(shape.hidden_size) +
                     " I=" + std::to_string(shape.intermediate_size) + " rows=";
  for (const int64_t rows : shape.rows_per_expert) text += std::to_string(rows) + ",";
  return text + " seed=" + std::to_string(shape.seed);
}

// A [rows, cols] matrix stored in `dtype`; values normal with the given deviation.
class StoredMatrix {
 public:
  StoredMatrix(int64_t rows, int64_t cols, DType dtype, double deviation, std::mt19937_64& random)
      : rows_(rows), cols_(cols), dtype_(dtype) {
    std::normal_distribution<double> normal(0.0, deviation);
    bytes_.resize(static_cast<size_t>(rows * cols * byte_size(dtype)));
    for (int64_t i = 0; i < rows * cols; ++i) set(i, static_cast<float>(normal(random)));
  }

  void set(int64_t index, float value) {
    if (dtype_ == DType::kF32) {
      std::memcpy(element(index), &value, sizeof(value));
    } else {
      const uint16_t bits = dtype_ == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
      std::memcpy(element(index), &bits, sizeof(bits));
    }
  }
  double at(int64_t index) const {
    if (dtype_ == DType::kF32) {
      float value;
      std::memcpy(&value, element(index), sizeof(value));
      return value;
    }
    uint16_t bits;
    std::memcpy(&bits, element(index), sizeof(bits));
    return dtype_ == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
  ConstTensorView view() const { return {bytes_.data(), dtype_, Shape{rows_, cols_}, 0}; }
  int64_t cols() const { return cols_; }

 private:
  std::byte* element(int64_t index) { return bytes_.data() + index * byte_size(dtype_); }
  const std::byte* element(int64_t index) const {
    return bytes_.data() + index * byte_size(dtype_);
  }

  int64_t rows_;
  int64_t cols_;
  DType dtype_;
  std::vector<std::byte> bytes_;
};

struct StoredExpert {
  StoredMatrix gate;
  StoredMatrix up;
  StoredMatrix down;
};

// 64-byte aligned bytes, filled with a pattern that is a NaN in every float type.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(std::max<size_t>(bytes, 1), kAlign))),
        bytes_(bytes) {
    std::memset(data_.get(), 0xff, bytes);
  }
  std::byte* data() const { return data_.get(); }
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlign); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_;
};

class ExpertCase {
 public:
  explicit ExpertCase(CaseShape shape) : shape_(std::move(shape)) {
    std::mt19937_64 random(shape_.seed);
    const int64_t h = shape_.hidden_size;
    const int64_t i = shape_.intermediate_size;
    for (size_t e = 0; e < shape_.rows_per_expert.size(); ++e) {
      experts_.push_back({StoredMatrix(i, h, shape_.weights, 1.0 / std::sqrt(double(h)), random),
                          StoredMatrix(i, h, shape_.weights, 1.0 / std::sqrt(double(h)), random),
                          StoredMatrix(h, i, shape_.weights, 1.0 / std::sqrt(double(i)), random)});
    }
    const int64_t most =
        *std::max_element(shape_.rows_per_expert.begin(), shape_.rows_per_expert.end());
    num_tokens_ = most + 3;
    std::normal_distribution<float> normal(0.0F, 1.0F);
    hidden_.resize(static_cast<size_t>(num_tokens_ * h));
    for (float& value : hidden_) value = bf16_to_float(float_to_bf16(normal(random)));
    // Each expert takes other tokens, in an order that is not ascending.
    for (const int64_t rows : shape_.rows_per_expert) {
      begin_.push_back(static_cast<int64_t>(source_row_.size()));
      const int64_t first = static_cast<int64_t>(random() % static_cast<uint64_t>(num_tokens_));
      for (int64_t r = 0; r < rows; ++r) {
        source_row_.push_back((first + (rows - r) * 1) % num_tokens_);
      }
    }
  }

  const CaseShape& shape() const { return shape_; }
  int64_t num_slots() const { return static_cast<int64_t>(source_row_.size()); }
  std::vector<StoredExpert>& experts() { return experts_; }
  std::vector<float>& hidden() { return hidden_; }
  const std::vector<int64_t>& source_row() const { return source_row_; }
  int64_t expert_of_slot(int64_t slot) const {
    size_t e = begin_.size();
    while (begin_[e - 1] > slot || shape_.rows_per_expert[e - 1] == 0) --e;
    return static_cast<int64_t>(e) - 1;
  }

  experts::ExpertsProblem problem(cpu::Isa isa, cpu::Arithmetic arithmetic) const {
    return {.num_local_experts = static_cast<int64_t>(experts_.size()),
            .hidden_size = shape_.hidden_size,
            .intermediate_size = shape_.intermediate_size,
            .weight_dtype = shape_.weights,
            .isa = isa,
            .arithmetic = arithmetic};
  }

  // The float64 output row of a slot.
  std::vector<double> oracle(int64_t slot) const {
    const int64_t h = shape_.hidden_size;
    const StoredExpert& expert = experts_[static_cast<size_t>(expert_of_slot(slot))];
    const float* x = hidden_.data() + source_row_[static_cast<size_t>(slot)] * h;
    std::vector<double> activated(static_cast<size_t>(shape_.intermediate_size));
    for (int64_t i = 0; i < shape_.intermediate_size; ++i) {
      double gate = 0.0;
      double up = 0.0;
      for (int64_t k = 0; k < h; ++k) {
        gate += double(x[k]) * expert.gate.at(i * h + k);
        up += double(x[k]) * expert.up.at(i * h + k);
      }
      activated[static_cast<size_t>(i)] =
          activation::apply_reference(activation::Activation{}, gate, up);
    }
    std::vector<double> out(static_cast<size_t>(h), 0.0);
    for (int64_t c = 0; c < h; ++c) {
      for (int64_t i = 0; i < shape_.intermediate_size; ++i) {
        out[static_cast<size_t>(c)] +=
            activated[static_cast<size_t>(i)] * expert.down.at(c * shape_.intermediate_size + i);
      }
    }
    return out;
  }

  // [num_slots, H] dense. Workspace and output start as NaN patterns.
  std::vector<float> run(const experts::ExpertsKernel& kernel, Executor& executor) const {
    const experts::SlabBytes bytes = kernel.slab_bytes();
    AlignedBytes gate_up(bytes.gate_up * experts_.size());
    AlignedBytes down(bytes.down * experts_.size());
    for (size_t e = 0; e < experts_.size(); ++e) {
      kernel.pack({.gate = experts_[e].gate.view(),
                   .up = experts_[e].up.view(),
                   .down = experts_[e].down.view()},
                  gate_up.data() + e * bytes.gate_up, down.data() + e * bytes.down);
    }
    const experts::BatchRequirements needs = kernel.requirements();
    AlignedBytes rows(static_cast<size_t>(num_tokens_ * needs.row_bytes));
    const ConstTensorView hidden{hidden_.data(), DType::kF32,
                                 Shape{num_tokens_, shape_.hidden_size}, 0};
    const RowBundle bundle =
        experts::quantize_rows(hidden, needs.row_dtype, needs.row_bytes, rows.data(), executor);
    AlignedBytes workspace(kernel.workspace_bytes(num_slots()));
    std::vector<float> out(static_cast<size_t>(num_slots() * shape_.hidden_size), NAN);
    kernel.run({.bundle = bundle,
                .num_local_experts = static_cast<int64_t>(experts_.size()),
                .num_slots = num_slots(),
                .expert_begin = begin_.data(),
                .expert_count = shape_.rows_per_expert.data(),
                .source_row = source_row_.data()},
               {.gate_up = gate_up.data(), .down = down.data()},
               {.rows = out.data(), .row_stride = shape_.hidden_size}, workspace.span(), executor);
    return out;
  }

 private:
  CaseShape shape_;
  std::vector<StoredExpert> experts_;
  int64_t num_tokens_ = 0;
  std::vector<float> hidden_;
  std::vector<int64_t> begin_;
  std::vector<int64_t> source_row_;
};

// A kernel row that this CPU can run on the case, with the isa and arithmetic to ask for.
struct UsableRow {
  const experts::KernelRow* row;
  std::unique_ptr<experts::ExpertsKernel> kernel;
};

// Says on stdout, once, that a row was not tested and why.
inline void report_untested(std::string_view row, const std::string& reason) {
  static std::set<std::string, std::less<>> reported;
  if (reported.emplace(row).second)
    std::cout << "not on this CPU: " << row << " (" << reason << ")\n";
}

// Every row of the catalog that takes the case's weights and that this CPU offers.
inline std::vector<UsableRow> usable_rows(const ExpertCase& test_case) {
  std::vector<UsableRow> usable;
  const cpu::Isa best = cpu::best_isa();
  static const auto catalog = experts::kernel_catalog();
  for (const experts::KernelRow& row : catalog.rows()) {
    const auto problem = test_case.problem(best, row.arithmetic);
    const Support here = row.supports(problem);
    if (here) {
      usable.push_back({&row, row.make(problem)});
    } else if (row.supports(test_case.problem(cpu::Isa::kAmx, row.arithmetic))) {
      report_untested(row.name, here.reason());
    }
  }
  return usable;
}

inline MlpPrecision precision(const CaseShape& shape, const experts::ExpertsKernel& kernel) {
  return {.hidden_size = shape.hidden_size,
          .intermediate_size = shape.intermediate_size,
          .accumulator = DType::kF32,
          .rows = kernel.requirements().row_dtype};
}

}  // namespace conclave::testing
