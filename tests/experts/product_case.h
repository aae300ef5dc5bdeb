// Functions of products with the formats whose panels they multiply, as cases of tests.
#pragma once

#include "experts/coded_problem.h"
#include "experts/cpu/mlp_functions.h"
#include "quant/weight_format.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace conclave::testing {

struct ProductFunction {
  const char* name;
  experts::MlpFunctions (*make)(DType weights, const activation::Activation& activation);
  bool (*runs_here)();
};

struct ProductCase {
  ProductFunction function;
  const quant::WeightFormat* format;
};

// Each function with each format of codes that `takes` names.
template <class Takes>
std::vector<ProductCase> product_cases(const std::vector<ProductFunction>& functions,
                                       const Takes& takes) {
  std::vector<ProductCase> cases;
  for (const ProductFunction& function : functions) {
    for (const quant::WeightFormat& format : quant::panel_catalog().rows()) {
      if (format.codes != nullptr && takes(format)) cases.push_back({function, &format});
    }
  }
  return cases;
}

inline std::string product_case_name(const ::testing::TestParamInfo<ProductCase>& tested) {
  return std::string(tested.param.function.name) + "_" + std::string(tested.param.format->name);
}

class ProductTest : public ::testing::TestWithParam<ProductCase> {
 protected:
  void SetUp() override {
    const ProductFunction& function = GetParam().function;
    if (!function.runs_here()) GTEST_SKIP() << "this CPU lacks " << function.name;
  }
  const quant::WeightFormat& format() const { return *GetParam().format; }
  experts::MlpFunctions functions() const { return GetParam().function.make(format().element, {}); }
  gemm::PanelFunction product() const { return functions().product; }
};

// `count` rows of k values that `value` gives, with positive scales of `scale_width` values each.
template <class Value>
Rows random_rows(Problem& problem, int64_t count, int64_t scale_width, const Value& value) {
  const int64_t k = problem.layout.k;
  const int64_t scales = (k + scale_width - 1) / scale_width;
  Rows rows{.count = count, .stride = k + scales, .scale_width = scale_width};
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t i = 0; i < k; ++i) rows.floats.push_back(value());
    for (int64_t s = 0; s < scales; ++s) rows.floats.push_back(problem.uniform());
  }
  return rows;
}

}  // namespace conclave::testing
