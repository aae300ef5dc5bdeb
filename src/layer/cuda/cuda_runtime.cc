#include "layer/cuda/cuda_runtime.h"

#include "core/weight_types.h"
#include "cuda/check.h"
#include "cuda/device_info.h"
#include "cuda/memory_place.h"
#include "cuda/stream.h"
#include "layer/cuda/upload_lanes.h"

#include "conclave/interop/cuda.h"

#include <fmt/format.h>

#include <cuda_runtime_api.h>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

namespace conclave::inline v0 {
namespace {

// cudaMalloc aligns to 256 bytes or more, which covers every alignment requested.
class CudaAllocator final : public DeviceAllocator {
 public:
  explicit CudaAllocator(int32_t ordinal) : ordinal_(ordinal) {}

  void* allocate(size_t bytes, size_t /*alignment*/, Stream /*stream*/) override {
    const cuda::DeviceGuard guard(ordinal_);
    void* data = nullptr;
    if (cudaMalloc(&data, bytes) == cudaSuccess) return data;
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }

  // cudaFree waits for the device, and with it for `stream`.
  void deallocate(void* data, size_t /*bytes*/, Stream /*stream*/) noexcept override {
    static_cast<void>(cudaFree(data));
  }

 private:
  int32_t ordinal_;
};

class CudaRowUpload final : public RowUpload {
 public:
  CudaRowUpload(const WeightSource& source, cudaStream_t stream, int32_t ordinal,
                Executor& executor)
      : source_(source), stream_(stream), lanes_(source, stream, ordinal, executor, rings_) {}
  ~CudaRowUpload() override { static_cast<void>(cudaStreamSynchronize(stream_)); }
  CudaRowUpload(const CudaRowUpload&) = delete;
  CudaRowUpload& operator=(const CudaRowUpload&) = delete;

  void copy(std::span<const RowsToDevice> rows) override {
    if (rows.empty()) return;
    const auto request = [](const RowsToDevice& one) {
      return BlockRequest{.id = one.id, .expert = one.expert, .block = one.block};
    };
    lanes_.for_each(
        std::ssize(rows),
        [&](WeightUpload& lane) {
          return [&](int64_t index) {
            const RowsToDevice& one = rows[static_cast<size_t>(index)];
            const DType dtype = source_.describe(one.id).dtype;
            const int64_t columns = one.block.col_end - one.block.col_begin;
            lane.copy(request(one), {.data = one.to, .stride_bytes = packed_bytes(dtype, columns)});
          };
        },
        lanes_.used_for(request(rows.front())));
  }

 private:
  const WeightSource& source_;
  cudaStream_t stream_;
  PinnedRings rings_;
  UploadLanes lanes_;
};

class CudaRuntime final : public DeviceRuntime {
 public:
  explicit CudaRuntime(int32_t ordinal) : ordinal_(ordinal), allocator_(ordinal) {}

  DeviceAllocator& allocator() const override { return allocator_; }

  Stream make_stream() const override {
    const cuda::DeviceGuard guard(ordinal_);
    return to_stream(cuda::make_stream().release());
  }

  void destroy_stream(Stream stream) const noexcept override {
    static_cast<void>(cudaStreamSynchronize(to_cuda(stream)));
    static_cast<void>(cudaStreamDestroy(to_cuda(stream)));
  }

  void synchronize(Stream stream) const override {
    cuda::check(cudaStreamSynchronize(to_cuda(stream)), "cudaStreamSynchronize");
  }

  void copy_to_device(const void* source, void* destination, size_t bytes,
                      Stream stream) const override {
    copy(source, destination, bytes, cudaMemcpyHostToDevice, stream);
  }

  void copy_to_host(const void* source, void* destination, size_t bytes,
                    Stream stream) const override {
    copy(source, destination, bytes, cudaMemcpyDeviceToHost, stream);
  }

  std::unique_ptr<RowUpload> make_row_upload(const WeightSource& source, Stream stream,
                                             Executor& executor) const override {
    return std::make_unique<CudaRowUpload>(source, to_cuda(stream), ordinal_, executor);
  }

  void fill(void* destination, int value, size_t bytes, Stream stream) const override {
    if (bytes == 0) return;
    const cuda::DeviceGuard guard(ordinal_);
    cuda::check(cudaMemsetAsync(destination, value, bytes, to_cuda(stream)), "cudaMemsetAsync");
  }

  void check_place(std::string_view name, const void* data) const override {
    cuda::check_place(name, data, ordinal_);
  }

  double time_replays(Stream stream, const std::function<void()>& enqueue,
                      int32_t replays) const override {
    const cuda::DeviceGuard guard(ordinal_);
    cudaStream_t const queue = to_cuda(stream);
    const cuda::OwnedGraph graph = cuda::capture(queue, enqueue);
    const cuda::OwnedEvent begin = cuda::make_event(cuda::EventTiming::kOn);
    const cuda::OwnedEvent end = cuda::make_event(cuda::EventTiming::kOn);
    cuda::check(cudaGraphLaunch(graph.get(), queue), "cudaGraphLaunch");
    cuda::check(cudaEventRecord(begin.get(), queue), "cudaEventRecord");
    for (int32_t i = 0; i < replays; ++i) {
      cuda::check(cudaGraphLaunch(graph.get(), queue), "cudaGraphLaunch");
    }
    cuda::check(cudaEventRecord(end.get(), queue), "cudaEventRecord");
    cuda::check(cudaStreamSynchronize(queue), "cudaStreamSynchronize");
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()),
                "cudaEventElapsedTime");
    return replays > 0 ? static_cast<double>(milliseconds) / replays : 0;
  }

 private:
  void copy(const void* source, void* destination, size_t bytes, cudaMemcpyKind kind,
            Stream stream) const {
    if (bytes == 0) return;
    const cuda::DeviceGuard guard(ordinal_);
    cuda::check(cudaMemcpyAsync(destination, source, bytes, kind, to_cuda(stream)),
                "cudaMemcpyAsync");
  }

  int32_t ordinal_;
  mutable CudaAllocator allocator_;
};

}  // namespace

std::string describe_cuda() {
  std::string text;
  for (int32_t ordinal = 0; ordinal < cuda::count_devices().count; ++ordinal) {
    const cuda::DeviceInfo info = cuda::device_info(ordinal);
    text += fmt::format("{}cuda:{} {}, {} multiprocessors, {:.1f} GiB", ordinal > 0 ? "; " : "",
                        ordinal, info.name, info.multiprocessors,
                        static_cast<double>(info.memory_bytes) / (int64_t{1} << 30));
  }
  return text;
}

Support cuda_usable(int32_t ordinal) {
  const cuda::DeviceCount devices = cuda::count_devices();
  if (devices.count == 0) return Support::no(devices.reason);
  if (ordinal >= devices.count) {
    return Support::no("the driver has " + std::to_string(devices.count) + " devices");
  }
  return cuda::runs_plain_kernels(cuda::device_info(ordinal));
}

const DeviceRuntime* cuda_runtime(int32_t ordinal) {
  static std::mutex mutex;
  // The map is never destroyed: memory may be freed while the process ends.
  static auto& runtimes = *new std::map<int32_t, CudaRuntime>();
  const std::scoped_lock lock(mutex);
  return &runtimes.try_emplace(ordinal, ordinal).first->second;
}

}  // namespace conclave::inline v0
