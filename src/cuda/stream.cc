#include "cuda/stream.h"

#include "cuda/check.h"

namespace conclave::inline v0::cuda {

void StreamDeleter::operator()(cudaStream_t stream) const noexcept {
  static_cast<void>(cudaStreamDestroy(stream));
}

void EventDeleter::operator()(cudaEvent_t event) const noexcept {
  static_cast<void>(cudaEventDestroy(event));
}

void GraphExecDeleter::operator()(cudaGraphExec_t graph) const noexcept {
  static_cast<void>(cudaGraphExecDestroy(graph));
}

OwnedStream make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return OwnedStream(stream);
}

OwnedEvent make_event(EventTiming timing) {
  cudaEvent_t event = nullptr;
  const unsigned flags = timing == EventTiming::kOn ? cudaEventDefault : cudaEventDisableTiming;
  check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags");
  return OwnedEvent(event);
}

void join(cudaStream_t from, cudaStream_t to, cudaEvent_t event) {
  check(cudaEventRecord(event, from), "cudaEventRecord");
  check(cudaStreamWaitEvent(to, event, 0), "cudaStreamWaitEvent");
}

namespace detail {

void begin_capture(cudaStream_t stream) {
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

OwnedGraph end_capture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t exec = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
  static_cast<void>(cudaGraphDestroy(graph));
  check(status, "cudaGraphInstantiate");
  return OwnedGraph(exec);
}

void abandon_capture(cudaStream_t stream) noexcept {
  cudaGraph_t graph = nullptr;
  if (cudaStreamEndCapture(stream, &graph) == cudaSuccess && graph != nullptr) {
    static_cast<void>(cudaGraphDestroy(graph));
  }
  static_cast<void>(cudaGetLastError());
}

}  // namespace detail

}  // namespace conclave::inline v0::cuda
