// Owners of streams, events and graphs. No stream synchronises with the legacy stream.
#pragma once

#include <cuda_runtime_api.h>
#include <memory>

namespace conclave::inline v0::cuda {

struct StreamDeleter {
  void operator()(cudaStream_t stream) const noexcept;
};
struct EventDeleter {
  void operator()(cudaEvent_t event) const noexcept;
};
struct GraphExecDeleter {
  void operator()(cudaGraphExec_t graph) const noexcept;
};
using OwnedStream = std::unique_ptr<CUstream_st, StreamDeleter>;
using OwnedEvent = std::unique_ptr<CUevent_st, EventDeleter>;
using OwnedGraph = std::unique_ptr<CUgraphExec_st, GraphExecDeleter>;

// Make a stream or an event on the current device. Throw Error(kDevice).
OwnedStream make_stream();
enum class EventTiming { kOff, kOn };
OwnedEvent make_event(EventTiming timing = EventTiming::kOff);

// Makes `to` wait for the work that `from` holds now; can be captured.
void join(cudaStream_t from, cudaStream_t to, cudaEvent_t event);

// Captures the work that `enqueue` puts on `stream`. If `enqueue` throws, ends the capture and
// rethrows.
template <class Enqueue>
OwnedGraph capture(cudaStream_t stream, const Enqueue& enqueue);

namespace detail {
void begin_capture(cudaStream_t stream);
OwnedGraph end_capture(cudaStream_t stream);
void abandon_capture(cudaStream_t stream) noexcept;
}  // namespace detail

template <class Enqueue>
OwnedGraph capture(cudaStream_t stream, const Enqueue& enqueue) {
  detail::begin_capture(stream);
  try {
    enqueue();
  } catch (...) {
    detail::abandon_capture(stream);
    throw;
  }
  return detail::end_capture(stream);
}

}  // namespace conclave::inline v0::cuda
