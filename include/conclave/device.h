// Describes this machine: CPU features, instruction-set rows, measured ceilings.
#pragma once

#include "conclave/context.h"
#include "conclave/version.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave::inline v0 {

struct IsaInfo {
  std::string name;  // "avx512_bf16"
  bool usable = false;
  std::string reason;  // why it is not usable: "CPU lacks avx512_bf16", "OS does not save AMX
                       // tiles"
};

struct NumaNode {
  int32_t id = 0;
  int64_t memory_bytes = 0;
  std::vector<int32_t> cpus;
};

struct CpuInfo {
  std::string vendor;  // "GenuineIntel"
  std::string brand;   // as the CPU prints it
  int32_t family = 0;
  int32_t model = 0;
  int32_t stepping = 0;
  std::vector<std::string> features;  // only those that matter here: "avx2", "fma", ...
  int32_t usable_cpus = 0;            // this process's affinity mask, cgroup quota applied
  int64_t l1d_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t l3_bytes = 0;
  int64_t memory_bytes = 0;
  std::string huge_pages;     // "always", "madvise", "never", "unknown"
  std::vector<IsaInfo> isas;  // best first, scalar last
  std::vector<NumaNode> numa;
  std::string arithmetic;         // the choice of the CPU table for bf16 weights
  std::string arithmetic_reason;  // the table's row
};
CONCLAVE_API CpuInfo cpu_info();

// The machine's own limits, measured now with the context's threads.
struct ArithmeticRate {
  std::string isa;
  std::string arithmetic;
  double gflops = 0;      // multiply and add each count one
  bool of_codes = false;  // products of int8 codes, not of values
};
struct Ceilings {
  double read_gbps = 0;  // best of `repetitions` reads of `read_bytes` with huge pages; 1e9 bytes/s
  std::vector<ArithmeticRate> rates;
  double best_gflops() const noexcept;  // leaves out the rates of codes
  // The best rate of codes if this arithmetic has one, else of values.
  double best_gflops(std::string_view arithmetic) const noexcept;
};
struct CeilingOptions {
  int64_t read_bytes = int64_t{2} << 30;
  int32_t repetitions = 5;
  double seconds_per_rate = 0.2;
};
CONCLAVE_API Ceilings measure_ceilings(const Context& context, const CeilingOptions& options = {});

// Devices and libraries other than the CPU that this build can or cannot use, and why.
struct BackendInfo {
  std::string name;  // "cuda", "mpi", "nccl"
  bool usable = false;
  std::string reason;
};
CONCLAVE_API std::vector<BackendInfo> backends();

}  // namespace conclave::inline v0
