// conclave doctor: measures what this machine offers and whether the choices made for it fit.
#include "commands.h"
#include "input/machine_options.h"
#include "machine_verdict.h"
#include "output/numbers.h"
#include "ranks/probe.h"

#include "conclave/comm.h"
#include "conclave/device.h"
#include "conclave/version.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace conclave::tool {
namespace {

struct DoctorOptions {
  bool quick = false;
  bool json = false;
  MachineOptions machine;
  OutputOptions printing;
};

constexpr const char* kDoctor = "doctor";
constexpr const char* kVariables[] = {"CONCLAVE_DEVICE", "CONCLAVE_NUM_THREADS",
                                      "CONCLAVE_ISA",    "CONCLAVE_PIN_THREADS",
                                      "OMP_NUM_THREADS", "NO_COLOR"};

struct Report {
  CpuInfo cpu;
  std::vector<BackendInfo> backends;
  std::vector<TransportInfo> transports;
  int32_t threads = 0;
  std::string isa;
  bool measured = false;
  Ceilings ceilings;
  Judgement table;
  std::vector<std::string> advice;
};

// The forced instruction set, or the best one if none is forced.
std::string isa_in_use(const CpuInfo& cpu, const Context& context) {
  if (!context.isa().empty()) return context.isa();
  const auto best =
      std::find_if(cpu.isas.begin(), cpu.isas.end(), [](const IsaInfo& isa) { return isa.usable; });
  return best == cpu.isas.end() ? "" : best->name;
}

std::vector<std::string> advice(const Report& report) {
  std::vector<std::string> list;
  if (report.cpu.huge_pages == "never") {
    list.push_back("huge pages are off: set transparent_hugepage to madvise for faster reads");
  }
  if (report.threads > report.cpu.usable_cpus) {
    list.push_back(fmt::format("{} threads on {} usable CPUs will take turns", report.threads,
                               report.cpu.usable_cpus));
  }
  if (!report.cpu.isas.empty() && report.isa == "scalar") {
    list.push_back("the scalar row is in use: it is meant for checking, not for speed");
  }
  if (report.table.verdict == TableVerdict::kBusy) {
    list.push_back(
        "the machine is busy, so that its rates say little: run doctor again when it is idle");
  }
  if (report.table.verdict == TableVerdict::kLooksWrong) {
    list.push_back(
        fmt::format("the arithmetic table looks wrong for this CPU (family {}, model {}): "
                    "try --arithmetic, and please report it",
                    report.cpu.family, report.cpu.model));
  }
  return list;
}

nlohmann::ordered_json to_json(const Report& report) {
  const CpuInfo& cpu = report.cpu;
  nlohmann::ordered_json json = {{"version", build_info().version},
                                 {"commit", build_info().commit},
                                 {"compiler", build_info().compiler},
                                 {"build_type", build_info().build_type},
                                 {"features", build_info().features},
                                 {"cpu",
                                  {{"brand", cpu.brand},
                                   {"vendor", cpu.vendor},
                                   {"family", cpu.family},
                                   {"model", cpu.model},
                                   {"stepping", cpu.stepping},
                                   {"features", cpu.features},
                                   {"usable_cpus", cpu.usable_cpus},
                                   {"l1d_bytes", cpu.l1d_bytes},
                                   {"l2_bytes", cpu.l2_bytes},
                                   {"l3_bytes", cpu.l3_bytes}}},
                                 {"threads", report.threads},
                                 {"isa", report.isa},
                                 {"arithmetic", cpu.arithmetic},
                                 {"arithmetic_reason", cpu.arithmetic_reason},
                                 {"memory_bytes", cpu.memory_bytes},
                                 {"huge_pages", cpu.huge_pages}};
  for (const IsaInfo& isa : cpu.isas) {
    json["isas"].push_back({{"name", isa.name}, {"usable", isa.usable}, {"reason", isa.reason}});
  }
  for (const NumaNode& node : cpu.numa) {
    json["numa"].push_back(
        {{"id", node.id}, {"memory_bytes", node.memory_bytes}, {"cpus", node.cpus}});
  }
  for (const BackendInfo& backend : report.backends) {
    json["backends"].push_back(
        {{"name", backend.name}, {"usable", backend.usable}, {"reason", backend.reason}});
  }
  for (const TransportInfo& transport : report.transports) {
    json["transports"].push_back(
        {{"name", transport.name}, {"usable", transport.usable}, {"reason", transport.reason}});
  }
  if (report.measured) {
    json["read_gbps"] = report.ceilings.read_gbps;
    for (const ArithmeticRate& rate : report.ceilings.rates) {
      json["rates"].push_back(
          {{"isa", rate.isa}, {"arithmetic", rate.arithmetic}, {"gflops", rate.gflops}});
    }
    json["arithmetic_table"] = report.table.text;
  }
  json["advice"] = report.advice;
  return json;
}

void line(std::string_view label, std::string_view text) { fmt::print("{:<14} {}\n", label, text); }

std::string mark(bool good) {
  return paint(good ? "yes" : "no ", good ? Style::kGood : Style::kPlain, shows_color(stdout));
}

void print_cpu(const CpuInfo& cpu) {
  line("CPU", fmt::format("{} ({}, family {}, model {}, stepping {})", cpu.brand, cpu.vendor,
                          cpu.family, cpu.model, cpu.stepping));
  line("features", fmt::format("{}", fmt::join(cpu.features, " ")));
  line("caches",
       fmt::format("L1d {}, L2 {}, L3 {}", binary_bytes_text(static_cast<uint64_t>(cpu.l1d_bytes)),
                   binary_bytes_text(static_cast<uint64_t>(cpu.l2_bytes)),
                   binary_bytes_text(static_cast<uint64_t>(cpu.l3_bytes))));
  line("memory",
       fmt::format("{}, huge pages: {}", binary_bytes_text(static_cast<uint64_t>(cpu.memory_bytes)),
                   cpu.huge_pages));
  for (const NumaNode& node : cpu.numa) {
    line(fmt::format("NUMA node {}", node.id),
         fmt::format("{}, {} CPUs", binary_bytes_text(static_cast<uint64_t>(node.memory_bytes)),
                     node.cpus.size()));
  }
}

void print_choices(const Report& report) {
  line("threads", fmt::format("{} of {} usable CPUs", report.threads, report.cpu.usable_cpus));
  for (const IsaInfo& isa : report.cpu.isas) {
    const std::string why = isa.usable ? (isa.name == report.isa ? "in use" : "") : isa.reason;
    line(&isa == report.cpu.isas.data() ? "instructions" : "",
         fmt::format("{} {:<12} {}", mark(isa.usable), isa.name, why));
  }
  line("arithmetic", fmt::format("{} for bf16 weights ({})", report.cpu.arithmetic,
                                 report.cpu.arithmetic_reason));
}

void print_measurements(const Report& report) {
  line("read", fmt::format("{:.1f} GB/s", report.ceilings.read_gbps));
  for (const ArithmeticRate& rate : report.ceilings.rates) {
    line(&rate == report.ceilings.rates.data() ? "multiply-add" : "",
         fmt::format("{:7.1f} GFLOP/s  {} {}", rate.gflops, rate.isa, rate.arithmetic));
  }
  line("table", report.table.text);
}

void print_report(const Report& report) {
  const BuildInfo& build = build_info();
  line("conclave", fmt::format("{} (commit {}, {}, {}; {})", build.version, build.commit,
                               build.compiler, build.build_type, build.features));
  print_cpu(report.cpu);
  print_choices(report);
  if (report.measured) print_measurements(report);
  for (const BackendInfo& backend : report.backends) {
    line(backend.name, fmt::format("{} {}", mark(backend.usable), backend.reason));
  }
  for (const TransportInfo& transport : report.transports) {
    line(&transport == report.transports.data() ? "transports" : "",
         fmt::format("{} {:<12} {}", mark(transport.usable), transport.name, transport.reason));
  }
  for (const char* const& name : kVariables) {
    const std::string value = environment_value(name);
    line(&name == &kVariables[0] ? "environment" : "",
         fmt::format("{}={}", name, value.empty() ? "(not set)" : value));
  }
  for (const std::string& text : report.advice) line("advice", text);
}

ExitCode run_doctor(const DoctorOptions& options) {
  Console console(options.printing.progress());
  const Context context = make_context(options.machine, &console);
  Report report;
  report.cpu = cpu_info();
  report.backends = backends();
  report.transports = probed_transports(kDoctor);
  report.threads = context.executor().concurrency();
  report.isa = isa_in_use(report.cpu, context);
  report.measured = !options.quick;
  if (report.measured) {
    const std::vector<CeilingMeasurement> measurements =
        measure_machine(context, report.cpu.arithmetic);
    report.ceilings = best_of(measurements);
    report.table = judge_arithmetic(measurements, report.cpu.arithmetic);
  }
  report.advice = advice(report);
  console.clear();
  if (options.json) {
    fmt::print("{}\n", json_text(to_json(report), 2));
  } else {
    print_report(report);
  }
  return ExitCode::kOk;
}

}  // namespace

void add_doctor_command(CommandLine& line) {
  Command command = line.add_command(
      kDoctor, "Show what this machine offers, its measured speed, and what is missing and why");
  auto options = std::make_shared<DoctorOptions>();
  command.flag("-q,--quick", options->quick, "Measure nothing");
  command.flag("--json", options->json, "Print JSON");
  add_threads_option(command, options->machine);
  command.text("--isa", "NAME", options->machine.isa, "Instruction set to use");
  add_progress_option(command, options->printing);
  command.footer(
      "Examples:\n"
      "  conclave doctor\n"
      "  conclave doctor --quick --json");
  command.on_run([options] { return run_doctor(*options); });
}

}  // namespace conclave::tool
