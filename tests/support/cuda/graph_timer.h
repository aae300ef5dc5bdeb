// Times a forward inside a CUDA graph of several, each on another input.
#pragma once

#include <cstdint>
#include <functional>

struct CUstream_st;

namespace conclave::testing {

struct GraphTiming {
  int32_t inputs = 1;   // forwards in the graph: enqueue(0) to enqueue(inputs - 1)
  int32_t replays = 5;  // timed, after one that is not timed
};

// Returns the median microseconds of one forward. `enqueue` puts input i on the stream and
// allocates nothing.
double time_graph(const GraphTiming& timing,
                  const std::function<void(int32_t input, CUstream_st* stream)>& enqueue);

}  // namespace conclave::testing
