#include "support/cuda/graph_timer.h"

#include "cuda/check.h"
#include "cuda/stream.h"

#include <algorithm>
#include <vector>

namespace conclave::testing {

double time_graph(const GraphTiming& timing,
                  const std::function<void(int32_t, CUstream_st*)>& enqueue) {
  const cuda::OwnedStream stream = cuda::make_stream();
  const cuda::OwnedEvent begin = cuda::make_event(cuda::EventTiming::kOn);
  const cuda::OwnedEvent end = cuda::make_event(cuda::EventTiming::kOn);
  const cuda::OwnedGraph graph = cuda::capture(stream.get(), [&] {
    for (int32_t i = 0; i < timing.inputs; ++i) enqueue(i, stream.get());
  });
  std::vector<double> times;
  for (int32_t replay = -1; replay < timing.replays; ++replay) {
    cuda::check(cudaEventRecord(begin.get(), stream.get()), "cudaEventRecord");
    cuda::check(cudaGraphLaunch(graph.get(), stream.get()), "cudaGraphLaunch");
    cuda::check(cudaEventRecord(end.get(), stream.get()), "cudaEventRecord");
    cuda::check(cudaStreamSynchronize(stream.get()), "timed graph");
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsed");
    if (replay >= 0) times.push_back(1e3 * milliseconds / timing.inputs);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2),
                   times.end());
  return times[times.size() / 2];
}

}  // namespace conclave::testing
