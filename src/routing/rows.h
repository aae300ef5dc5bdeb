// Spreads the rows of a route call over the executor's workers, each with scratch of its own.
#pragma once

#include "core/dcheck.h"
#include "cpu/parallel.h"

#include "conclave/routing.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::routing {

// Rows given to a worker at once: about 10 us of work.
inline constexpr int64_t kRowGrain = 32;

// Scratch doubles per worker, rounded up to whole cache lines.
inline int64_t scratch_stride(int64_t doubles) { return (doubles + 7) / 8 * 8; }

inline size_t scratch_bytes_of(int64_t doubles, int32_t workers) {
  return static_cast<size_t>(scratch_stride(doubles)) * sizeof(double) *
         static_cast<size_t>(workers);
}

// Calls row(token, scratch) for every token; it returns true if the token had a usable logit.
// `doubles` is the scratch of one worker, as booked with scratch_bytes_of.
template <class Row>
RouterStats route_rows(const RouterInput& input, int64_t doubles, Executor& executor,
                       const Row& row) {
  std::atomic<int64_t> unusable{0};
  auto* scratch = static_cast<double*>(static_cast<void*>(input.scratch.data()));
  const int64_t stride = scratch_stride(doubles);
  CONCLAVE_DCHECK(input.scratch.size() >= scratch_bytes_of(doubles, executor.concurrency()));
  cpu::parallel_for(executor, input.num_tokens, kRowGrain,
                    [&](int64_t begin, int64_t end, int32_t worker) {
                      double* own = stride == 0 ? nullptr : scratch + worker * stride;
                      int64_t count = 0;
                      for (int64_t token = begin; token < end; ++token) {
                        count += row(token, own) ? 0 : 1;
                      }
                      if (count != 0) unusable.fetch_add(count, std::memory_order_relaxed);
                    });
  return {.tokens_without_finite_logit = unusable.load(std::memory_order_relaxed)};
}

// The result of a row without a finite logit: the first k ids, with weight 0.
inline bool give_first_ids(int64_t top_k, int32_t* ids, float* weights) {
  for (int64_t j = 0; j < top_k; ++j) {
    ids[j] = static_cast<int32_t>(j);
    weights[j] = 0;
  }
  return false;
}

}  // namespace conclave::inline v0::routing
