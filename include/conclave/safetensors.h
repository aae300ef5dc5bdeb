// Reads and writes safetensors files. The reader trusts nothing: header limits, checked sizes, no
// holes, no overlaps, no duplicate keys, one ErrorCode per rule.
#pragma once

#include "conclave/dtype.h"
#include "conclave/tensor.h"
#include "conclave/version.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// read() copies with pread in every mode. kMap also maps the file, for mapped(): that saves a copy
// (20 ms per GB), but if another process truncates the file, a signal ends this one, and if it
// rewrites the file, nobody notices. kAuto is kRead.
enum class FileAccess : uint8_t { kAuto, kMap, kRead };

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  // any rank
  uint64_t file_offset = 0;    // offset of the first byte from the start of the file
  uint64_t bytes = 0;
};

// Immutable; all members are safe to call from several threads.
class CONCLAVE_API SafetensorsFile {
 public:
  // Throws Error: 2xx for the file, 3xx for the header.
  static SafetensorsFile open(const std::filesystem::path& path,
                              FileAccess access = FileAccess::kAuto);
  // Validates a header held in memory: `bytes` starts with the 8-byte length; `file_bytes` is the
  // size of the whole file. For tests, fuzzing and streams.
  static std::vector<TensorInfo> parse_header(
      std::span<const std::byte> bytes, uint64_t file_bytes, std::string_view file_name,
      std::map<std::string, std::string>* metadata = nullptr);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::filesystem::path& path() const noexcept;
  std::span<const TensorInfo> tensors() const noexcept;          // in file order
  const TensorInfo* find(std::string_view name) const noexcept;  // null if absent
  const std::map<std::string, std::string>& metadata() const noexcept;

  // Copies bytes [offset, offset + destination.size()) of the tensor. Throws Error(kFileRead,
  // kFileChanged) naming file and offset; retries EINTR and short reads.
  void read(const TensorInfo& tensor, uint64_t offset, std::span<std::byte> destination) const;
  // The tensor's bytes in the mapping, in general unaligned; empty unless the access is kMap and
  // the file can be mapped.
  std::span<const std::byte> mapped(const TensorInfo& tensor) const noexcept;
  // Gives the pages of these bytes of the mapping back to the system, where there is one; they come
  // again when they are read.
  void release(const TensorInfo& tensor, uint64_t offset, uint64_t bytes) const noexcept;
  // A copy of the whole tensor.
  Tensor load(std::string_view name) const;

  struct Impl;

 private:
  explicit SafetensorsFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Streams tensors into a new file: declare all, then write each one's bytes in order, in pieces of
// any size. The file appears under its name only when finish() succeeds.
class CONCLAVE_API SafetensorsWriter {
 public:
  SafetensorsWriter(std::filesystem::path path, std::map<std::string, std::string> metadata = {});
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();  // removes an unfinished file

  void declare(std::string name, DType dtype, std::vector<int64_t> shape);
  void write(std::span<const std::byte> bytes);  // continues where the last call ended
  void finish();
  // Ends the file with zeros in place of all that was not written, which take no room where files
  // may have holes.
  void finish_with_zeros();

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

struct NamedTensor {
  std::string name;
  ConstTensorView tensor;
};
// declare + write + finish. Throws Error(kFileWrite).
CONCLAVE_API void save_safetensors(const std::filesystem::path& path,
                                   std::span<const NamedTensor> tensors,
                                   std::map<std::string, std::string> metadata = {});

}  // namespace conclave::inline v0
