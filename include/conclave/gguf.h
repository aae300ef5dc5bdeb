// Reads and writes GGUF files as containers: tensors by name and type, and keys as bytes. Layers of
// such files come from Checkpoint.
#pragma once

#include "conclave/format.h"
#include "conclave/tensor.h"
#include "conclave/version.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

struct GgufTensorInfo {
  std::string name;
  std::string_view type;       // "Q4_K", for as long as the program runs
  std::vector<int64_t> shape;  // the length of a row is last; at most 4 axes
  uint64_t bytes = 0;
};

// A tensor of any type in memory, as a file has it: rows one after the other.
struct GgufTensorView {
  uint32_t type = 0;                      // as ggml numbers types: 12 of Q4_K
  Shape shape = {};                       // the length of a row is last, where ggml has it first
  std::span<const std::byte> bytes = {};  // whole blocks
};

// A key with its value as files have it: the number of a type, then the value.
struct GgufKey {
  std::string name;
  std::vector<std::byte> value;

  static GgufKey of_u16(std::string name, uint16_t value);
  static GgufKey of_u32(std::string name, uint32_t value);
  static GgufKey of_i32(std::string name, int32_t value);
  static GgufKey of_f32(std::string name, float value);
  static GgufKey of_bool(std::string name, bool value);
  static GgufKey of_text(std::string name, std::string_view value);
  static GgufKey of_texts(std::string name, std::span<const std::string> values);
  static GgufKey of_i32s(std::string name, std::span<const int32_t> values);
  static GgufKey of_f32s(std::string name, std::span<const float> values);
};

// Immutable; all members are safe to call from several threads.
class CONCLAVE_API GgufReader {
 public:
  // A file, or the first part of a split model with its parts beside it. Throws Error as
  // Checkpoint::open does for them.
  static GgufReader open(const std::filesystem::path& path);
  // One file, which may be any part of a split model, without the others.
  static GgufReader open_part(const std::filesystem::path& path);
  GgufReader(GgufReader&&) noexcept;
  GgufReader& operator=(GgufReader&&) noexcept;
  ~GgufReader();

  std::span<const std::filesystem::path> paths() const noexcept;     // one for each part
  std::span<const GgufTensorInfo> tensors() const noexcept;          // in all parts, in file order
  const GgufTensorInfo* find(std::string_view name) const noexcept;  // null if absent
  uint64_t alignment() const noexcept;
  // The keys of the first part, in file order. Throws Error(kFileRead, kFileChanged).
  std::vector<GgufKey> keys() const;
  // Copies bytes [offset, offset + destination.size()) of one of `tensors()`. Throws
  // Error(kInvalidArgument, kFileRead, kFileChanged).
  void read(const GgufTensorInfo& tensor, uint64_t offset, std::span<std::byte> destination) const;

 private:
  struct Impl;
  explicit GgufReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Streams tensors into a new file of version 3: declare all, then write each one's bytes in order,
// in pieces of any size. The file appears under its name only when finish() succeeds.
class CONCLAVE_API GgufWriter {
 public:
  // Tensors begin at multiples of `alignment`, a power of two from 8 to 65536, which a key
  // "general.alignment" must state unless it is 32. Throws Error(kGgufAlignment).
  GgufWriter(std::filesystem::path path, std::span<const GgufKey> keys, uint64_t alignment = 32);
  GgufWriter(GgufWriter&&) noexcept;
  ~GgufWriter();  // removes an unfinished file

  // Throws Error(kGgufName, kGgufTensorType, kGgufShape, kGgufSizeOverflow, kGgufDuplicateTensor,
  // kState).
  void declare(std::string name, std::string_view type, std::vector<int64_t> shape);
  // Continues where the last call ended; a tensor's bytes may come in several calls. Throws
  // Error(kInvalidArgument, kFileWrite, kState).
  void write(std::span<const std::byte> bytes);
  void finish();
  // Ends the file with zeros in place of all that was not written, which take no room where files
  // may have holes.
  void finish_with_zeros();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The bytes of a row of `elements` of the type. Throws Error(kGgufTensorType) for an unknown type,
// and Error(kGgufShape) if the row does not hold whole blocks.
CONCLAVE_API uint64_t gguf_row_bytes(std::string_view type, int64_t elements);
// Decodes values of whole rows, blocks as gguf-py does. Throws Error(kGgufTensorType) for a type
// without values, and Error(kShape) unless `bytes` holds as many.
CONCLAVE_API void gguf_values(std::string_view type, std::span<const std::byte> bytes,
                              std::span<float> values);
// The name of a type by its number in files: "Q4_K" of 12, for as long as the program runs. Throws
// Error(kGgufTensorType).
CONCLAVE_API std::string_view gguf_type_name(uint32_t id);
// The number of a type by its name. Throws Error(kGgufTensorType).
CONCLAVE_API uint32_t gguf_type_number(std::string_view name);

// For each type of blocks: the weights of a layer whose matrices all have it. Such layers come from
// files; checkpoints of other kinds have no name for them, so that `method` is empty.
CONCLAVE_API std::vector<WeightForm> gguf_block_forms();
// Layers may have another type for down, as files mix them: "Q4_K+Q6_K" is what "Q4_K_M" files
// have in half of their layers, "Q4_K+Q5_0" where rows of down are no multiple of 256
// columns.
CONCLAVE_API std::vector<WeightForm> gguf_mixed_forms();

}  // namespace conclave::inline v0
