// The catalog asks these functions about the CPU's kernels.
#pragma once

#include "experts/kernel.h"
#include "experts/problem.h"

#include "conclave/error.h"

#include <memory>

namespace conclave::inline v0::experts {

Support amx_supports(const ExpertsProblem& problem);
std::unique_ptr<ExpertsKernel> make_amx(const ExpertsProblem& problem);

Support avx512_bf16_supports(const ExpertsProblem& problem);
std::unique_ptr<ExpertsKernel> make_avx512_bf16(const ExpertsProblem& problem);

Support amx_int8_supports(const ExpertsProblem& problem);
std::unique_ptr<ExpertsKernel> make_amx_int8(const ExpertsProblem& problem);

Support avx512_vnni_supports(const ExpertsProblem& problem);
std::unique_ptr<ExpertsKernel> make_avx512_vnni(const ExpertsProblem& problem);

Support avx_vnni_supports(const ExpertsProblem& problem);
std::unique_ptr<ExpertsKernel> make_avx_vnni(const ExpertsProblem& problem);

Support avx2_int8_supports(const ExpertsProblem& problem);
std::unique_ptr<ExpertsKernel> make_avx2_int8(const ExpertsProblem& problem);

Support avx512_supports(const ExpertsProblem& problem);
std::unique_ptr<ExpertsKernel> make_avx512(const ExpertsProblem& problem);

Support avx2_supports(const ExpertsProblem& problem);
std::unique_ptr<ExpertsKernel> make_avx2(const ExpertsProblem& problem);

// Takes every problem, even if another arithmetic was asked for: it always computes f32_fma.
Support cpu_reference_supports(const ExpertsProblem& problem);

}  // namespace conclave::inline v0::experts
