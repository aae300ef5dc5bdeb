"""The source checks of tools/ catch what they are for, and pass what is right."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"


class CheckCase(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)

    def write(self, name: str, text: str):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def check(self, tool: str, *arguments: str) -> tuple[int, str]:
        result = subprocess.run([sys.executable, TOOLS / tool, self.root, *arguments],
                                capture_output=True, text=True, check=False)
        return result.returncode, result.stdout + result.stderr


class CheckLayers(CheckCase):
    def expect_violation(self, name: str, line: int, text: str):
        status, output = self.check("check_layers.py")
        self.assertEqual(status, 1, output)
        self.assertIn(f"{name}:{line}:", output)
        self.assertIn(text, output)

    def test_allowed_edges_pass(self):
        self.write("include/conclave/layer.h", '#include "conclave/tensor.h"\n')
        self.write("include/conclave/tensor.h", "#include <span>\n")
        self.write("src/gemm/a.cc", '#include "gemm/a.h"\n#include "cpu/b.h"\n'
                                    '#include "conclave/tensor.h"\n')
        self.write("apps/conclave/run.cc", '#include "run.h"\n#include "conclave/layer.h"\n')
        self.write("apps/conclave/run.h", "")
        status, output = self.check("check_layers.py")
        self.assertEqual(status, 0, output)

    def test_upward_include_fails(self):
        self.write("src/core/a.cc", '// why\n#include "layer/plan.h"\n')
        self.expect_violation("src/core/a.cc", 2, "core may include the standard library only")

    def test_stage_including_a_stage_fails(self):
        self.write("src/routing/a.cc", '#include "experts/problem.h"\n')
        self.expect_violation("src/routing/a.cc", 1, "routing may include")

    def test_layer_including_checkpoint_fails(self):
        self.write("src/layer/a.cc", '#include "checkpoint/loader.h"\n')
        self.expect_violation("src/layer/a.cc", 1, "layer may include")

    def test_tool_including_internals_fails(self):
        self.write("apps/conclave/a.cc", '#include "core/checked.h"\n')
        self.expect_violation("apps/conclave/a.cc", 1, "public headers")

    def test_public_header_including_internals_fails(self):
        self.write("include/conclave/a.h", '#include "core/checked.h"\n')
        self.expect_violation("include/conclave/a.h", 1, "public headers include only conclave/*")

    def test_unknown_module_fails(self):
        self.write("src/misc/a.cc", '#include "core/a.h"\n')
        self.expect_violation("src/misc/a.cc", 1, "not in the layer diagram")

    def test_include_without_module_fails(self):
        self.write("src/core/a.cc", '#include "a.h"\n')
        self.expect_violation("src/core/a.cc", 1, "module/file.h")

    def test_commented_include_passes(self):
        self.write("src/core/a.cc", '/*\n#include "layer/plan.h"\n*/\n')
        self.assertEqual(self.check("check_layers.py")[0], 0)

    def test_function_that_another_module_defines_fails(self):
        self.write("src/core/a.h", "namespace n {\nstruct S;\n// Often.\nint count(const S& s);\n}\n")
        self.write("src/quant/a.cc", "namespace n {\nint count(const S& s) { return s.count(); }\n}\n")
        self.expect_violation("src/core/a.h", 4, "declares count, which no file of src/core defines")
        self.write("src/core/a.cc", "namespace n {\nint count(const S& s, int more) { return more; }\n"
                                    "int S::count(int more) { return count(*this); }\n}\n")
        self.expect_violation("src/core/a.h", 4, "declares count")
        self.write("src/core/b.cc", "namespace n {\nnamespace {\nstruct T {};\n}\n"
                                    "int count(const S& s) noexcept { return 0; }\n}\n")
        self.assertEqual(self.check("check_layers.py")[0], 0)

    def test_what_needs_no_definition_elsewhere_passes(self):
        self.write("src/core/a.h", "#define LIST(x) \\\n  int list(int x);\n"
                                   "inline int one(int a) { return a; }\n"
                                   "template <class T, class = std::map<int, T>>\n"
                                   "T two(std::map<int, T> map) { return map.at(2); }\n"
                                   "class C {\n  int three(int a);\n};\n"
                                   "constexpr int kFour = one(4);\ninline std::mutex five{};\n"
                                   "static_assert(kFour == 4);\nusing Six = int (*)(int);\n")
        status, output = self.check("check_layers.py")
        self.assertEqual(status, 0, output)

    def test_template_without_a_definition_fails(self):
        self.write("src/core/a.h", "template <class T>\n[[nodiscard]] std::vector<T>\nmake(T a, T b);\n")
        self.expect_violation("src/core/a.h", 1, "declares make")
        self.write("src/core/cuda/a.cu", "template <class T>\nstd::vector<T> make(T a, T b) {}\n")
        self.assertEqual(self.check("check_layers.py")[0], 0)

    def test_build_config_outside_its_users_fails(self):
        self.write("src/core/catalog.cc", '#include "core/build_config.h"\n')
        self.assertEqual(self.check("check_layers.py")[0], 0)
        self.write("src/core/a.cc", '#include "core/build_config.h"\n')
        self.expect_violation("src/core/a.cc", 1, "version.cc")


class CheckRules(CheckCase):
    def expect(self, status: int, rule: str = ""):
        actual, output = self.check("check_rules.py")
        self.assertEqual(actual, status, output)
        self.assertIn(rule, output)

    def test_clean_source_passes(self):
        self.write("src/core/a.cc", 'void f(C& c) { c.abort("printf("); }  // std::cout << 1\n')
        self.expect(0)

    def test_print_fails(self):
        self.write("src/core/a.cc", "void f() { std::cerr << 1; }\n")
        self.expect(1, "src/core/a.cc:1: no-print")

    def test_abort_fails(self):
        self.write("src/core/a.cc", "void f() {\n  std::abort();\n}\n")
        self.expect(1, "src/core/a.cc:2: no-exit")

    def test_assert_fails(self):
        self.write("src/core/a.cc", "void f(int x) { assert(x); }\n")
        self.expect(1, "no-assert")

    def test_static_assert_passes(self):
        self.write("src/core/a.cc", "static_assert(sizeof(int) == 4);\n")
        self.expect(0)

    def test_getenv_outside_its_file_fails(self):
        self.write("src/layer/context.cc", 'auto v = std::getenv("A");\n')
        self.expect(0)
        self.write("src/cpu/a.cc", 'auto v = std::getenv("A");\n')
        self.expect(1, "src/cpu/a.cc:1: no-getenv")

    def test_order_of_ids_fails(self):
        self.write("src/core/a.cc", "bool f(WeightPlane p) { return p <= WeightPlane::kBias; }\n")
        self.expect(1, "src/core/a.cc:1: no-id-order")
        self.write("src/core/a.cc", "bool f(WeightPlane p) { return p == WeightPlane::kBias; }\n"
                                    "auto x = g<LayerWeight::kRouter>();\n")
        self.expect(0)

    def test_mutable_static_fails(self):
        for line in ("static int calls = 0;", "static std::map<int, X> known;",
                     "  static std::mutex mutex;", "static auto& all = *new Set();",
                     "thread_local bool busy = false;", "static std::array<A, 3> a{};"):
            with self.subTest(line=line):
                self.write("src/core/a.cc", line + "\n")
                self.expect(1, "src/core/a.cc:1: no-mutable-static")
        for line in ("static constexpr int kX = 1;", "static const Table kRows = make();",
                     "static int f(int x);", "static void g(A a, B b) {}", "static Vec zero() {}",
                     "auto x = static_cast<int>(y);", "static_assert(x == 1);"):
            with self.subTest(line=line):
                self.write("src/core/a.cc", line + "\n")
                self.expect(0)

    def test_driver_query_outside_the_list_fails(self):
        for line in ("cudaFuncSetAttribute(kernel, a, 1);", "check(cudaGetDevice(&device), x);",
                     "cudaOccupancyMaxActiveClusters(&n, kernel, &c);",
                     "cudaDeviceGetAttribute(&value, which, 0);",
                     "cuda::allow_shared_bytes(kernel, bytes);", "cudaSetDevice(0);",
                     "cudaPointerGetAttributes(&a, data);", "auto d = cuda::device_info(0);"):
            with self.subTest(line=line):
                self.write("src/layer/cuda/stage.cc", line + "\n")
                self.expect(1, "src/layer/cuda/stage.cc:1: no-driver-query")
        for line in ("cudaLaunchKernelEx(&config, kernel);", "cudaMemsetAsync(p, 0, n, stream);",
                     "cudaEventRecord(event, stream);", "f();  // cudaGetDevice()",
                     "cudaGraphLaunch(graph, stream);"):
            with self.subTest(line=line):
                self.write("src/layer/cuda/stage.cc", line + "\n")
                self.expect(0)
        self.write("src/layer/cuda/stage.cc", "cudaGetDevice(&device);\n")
        self.write("tools/check_rules.allow",
                   "no-driver-query src/layer/cuda/stage.cc  # asks at create\n")
        self.expect(0)

    def test_genitives_fail(self):
        for line in ("// Of rows that wait.", "int x = 0;  // of the gate"):
            with self.subTest(line=line):
                self.write("src/core/a.cc", line + "\n")
                self.expect(1, "src/core/a.cc:1: whole-clauses")
        self.write("src/core/a.cc", "// Often.\nint x = 0;  // often of use\n")
        self.expect(0)

    def test_comments_that_begin_with_what_fail(self):
        for line in ("// What a rank says.", "  // What is left of it."):
            with self.subTest(line=line):
                self.write("include/conclave/a.h", line + "\n")
                self.expect(1, "include/conclave/a.h:1: says-why")
        self.write("include/conclave/a.h", "// Says what is left.\nint x;  // whatever it is\n")
        self.expect(0)

    def test_string_comparison_below_the_boundary_fails(self):
        self.write("src/quant/catalog.cc", 'bool f(S s) { return s == "bf16"; }\n')
        self.write("src/checkpoint/a.cc", 'bool f(S s) { return s == "bf16"; }\n')
        self.expect(0)
        self.write("src/quant/a.cc", 'bool f(S s) { return s == "bf16"; }\n')
        self.expect(1, "src/quant/a.cc:1: no-string-switch")

    def test_switch_on_a_routers_name_fails(self):
        for line in ("if (spec.router.name == name) return;", "bool a = name != router.name;",
                     "return router->name == RouterSpec().name;"):
            with self.subTest(line=line):
                self.write("src/layer/a.cc", line + "\n")
                self.expect(1, "src/layer/a.cc:1: no-router-switch")
        self.write("src/layer/a.cc", "auto& row = find_router(spec.router.name);\n"
                                     "spec.router.name = name;\n")
        self.expect(0)

    def test_name_of_a_router_outside_its_folder_fails(self):
        self.write("src/routing/catalog.cc", 'RouterRow{.name = "dice",\n.check = check}, '
                                             'RouterRow{.name = "cards"}\n')
        self.write("src/routing/dice/dice.cc", 'launch("dice");\n')
        self.write("src/checkpoint/a.cc", 'router.name = "dice";\n')
        self.write("src/layer/a.cc", '// "dice"\nthrow Error("dice are not cards");\n')
        self.expect(0)
        self.write("src/layer/a.cc", '\nconst char* wanted = "dice";\n')
        self.expect(1, "src/layer/a.cc:2: no-router-name")
        self.write("src/layer/a.cc", "\n")
        self.write("src/routing/dice/dice.cc", 'other("cards");\n')
        self.expect(1, "src/routing/dice/dice.cc:1: no-router-name")

    def test_switch_on_a_format_outside_quant_fails(self):
        for line in ("if (dtype == DType::kF8E4M3) return 1;", "bool a = DType::kI4 != dtype;",
                     "switch (dtype) { case DType::kI8: break; }",
                     "return spec.weight_dtype == conclave::DType::kF4;"):
            with self.subTest(line=line):
                self.write("src/experts/a.cc", line + "\n")
                self.expect(1, "src/experts/a.cc:1: no-format-switch")
        for line in ("if (dtype == DType::kF8E8M0) return 1;", "Tensor bytes(DType::kU8, {n});",
                     "return supports(problem, {DType::kF8E4M3});", "f();  // == DType::kI8",
                     "case DType::kI32:", "bool a = dtype == DType::kI64;"):
            with self.subTest(line=line):
                self.write("src/experts/a.cc", line + "\n")
                self.expect(0)
        self.write("src/quant/int8/a.h", "bool a = dtype == DType::kI8;\n")
        self.expect(0)
        self.write("src/quant/a.cc", "bool a = dtype == DType::kI8;\n")
        self.expect(1, "src/quant/a.cc:1: no-format-switch")
        self.write("src/quant/a.cc", "bool a = codes.mantissa_bits.has_value();\n")
        self.write("src/experts/a.cc", "bool a = dtype == DType::kI8;\n")
        self.write("tools/check_rules.allow", "no-format-switch src/experts/a.cc  # its own kernels\n")
        self.expect(0)

    def test_comparing_names_of_devices_in_python_fails(self):
        for line in ('mode = "in_place" if layer.device == "cpu" else "staged"',
                     'if "cpu" != self._layer.device: wait()', 'if context.device != "cpu": wait()',
                     'name = "cpu" if device.type == "cpu" else f"cuda:{device.index}"'):
            with self.subTest(line=line):
                self.write("python/conclave/vllm/a.py", "import b\n" + line + "\n")
                status, output = self.check("check_rules.py")
                self.assertEqual(status, 1)
                self.assertIn("python/conclave/vllm/a.py:2: no-device-name", output)
        self.write("python/conclave/_devices.py", 'a = "cpu" if device.type == "cpu" else f"cuda"\n')
        self.write("python/conclave/vllm/a.py", "a = traits_of(layer.device).reload_mode\n"
                                                'b = device_of(array) == "cpu"\n')
        self.expect(0)

    def test_types_that_hold_values_spelt_out_fail(self):
        spelt = ("bool a = d == DType::kF32 ||\n    d == conclave::DType::kF16 || d == DType::kBF16;\n",
                 "if (d != DType::kBF16 && d != DType::kF16 && d != DType::kF32) refuse(d);\n")
        for code in spelt:
            with self.subTest(code=code):
                self.write("src/gemm/a.cc", code)
                self.expect(1, "no-plain-list")
        for code in ("if (d == DType::kF32) a();\nif (d == DType::kF16) b();\n"
                     "if (d == DType::kBF16) c();\n", "if (is_plain(d)) a();\n"):
            with self.subTest(code=code):
                self.write("src/gemm/a.cc", code)
                self.expect(0)
        self.write("src/core/a.h", spelt[0])
        self.write("apps/conclave/value_types.h", spelt[0])
        self.expect(0)
        self.write("apps/conclave/a.cc", spelt[0])
        self.expect(1, "apps/conclave/a.cc:2: no-plain-list")

    def test_distance_of_rows_spelt_out_fails(self):
        spelt = "auto s = a.row_stride != 0 ? a.row_stride : a.shape[1];\n"
        self.write("src/core/row_stride.h", spelt)
        self.write("src/layer/a.cc", "auto s = row_stride(a);\n"
                                     "auto t = a.row_stride != 0 ? a.row_stride : columns;\n")
        self.expect(0)
        self.write("src/layer/a.cc", spelt)
        self.expect(1, "src/layer/a.cc:1: no-spelt-stride")

    def test_order_of_types_fails(self):
        for code in ("bool f(DType d) { return d <= DType::kF6E3M2; }",
                     "bool f(DType d) { return d > conclave::DType::kC64; }"):
            with self.subTest(code=code):
                self.write("src/io/a.cc", code + "\n")
                self.expect(1, "src/io/a.cc:1: no-type-order")
        for code in ("auto x = g<DType::kF32>(d);", "using X = Y<DType::kF32, int>;",
                     "bool f(DType d) { return d == DType::kF32; }"):
            with self.subTest(code=code):
                self.write("src/io/a.cc", code + "\n")
                self.expect(0)

    def test_format_named_without_a_reason_fails(self):
        self.write("src/layer/a.cc", "// e4m3 is fast\nint kind = 4;\nuint4 words; int8_t byte;\n")
        self.write("src/quant/e4m3/a.h", "constexpr DType kElement = DType::kF8E4M3;\n")
        self.write("src/checkpoint/methods/a.cc", 'DType codes() { return DType::kI4; }\n')
        self.expect(0)
        self.write("src/convert/forms/a.cc", 'constexpr auto kForm = "awq-int4";\n')
        self.expect(0)
        self.write("apps/other/a.cc", 'bool f(Text t) { return t == "mxfp4"; }\n')
        self.expect(1, "apps/other/a.cc:1: format-names")
        self.write("apps/other/a.cc", "")
        for code in ("DType d = DType::kF8E4M3;", 'auto name = "nvfp4";', "int q4_k_row = 0;"):
            self.write("src/layer/a.cc", f"int a;\n{code}\n")
            self.expect(1, "src/layer/a.cc:2: format-names")

    def test_more_files_that_name_formats_than_recorded_fail(self):
        for number in range(20):
            self.write(f"src/core/a{number}.cc", "float e4m3_to_float(uint8_t code);\n")
        self.expect(1, "format-names")
        status, output = self.check("format_names.py")
        self.assertEqual(status, 1, output)
        self.assertRegex(output, r"20 of +2  types of elements")
        self.assertIn("20 in all", output)
    def test_tensor_of_a_router_outside_its_folder_fails(self):
        self.write("src/routing/dice/dice.h", 'constexpr std::array kTensors = {RouterTensor{\n'
                                              '    .name = "die_faces", .id = id}};\n')
        self.write("src/routing/dice/dice.cc", "auto faces = weights.die_faces;\n")
        self.write("src/layer/a.cc", "// die_faces\nauto more = die_faces_of(spec);\n")
        self.expect(0)
        for line in ("auto faces = weights.die_faces;", 'take("die_faces");', "use(kDieFaces);",
                     "use(die_faces_);"):
            with self.subTest(line=line):
                self.write("src/layer/a.cc", "\n" + line + "\n")
                self.expect(1, "src/layer/a.cc:2: no-router-tensor")

    def test_comparing_modes_of_shared_experts_fails(self):
        for line in ("if (mode == SharedMode::kAdd) return;", "bool a = SharedMode::kAdd != mode;",
                     "switch (mode) { case SharedMode::kAdd: break; }"):
            with self.subTest(line=line):
                self.write("src/layer/a.cc", line + "\n")
                self.expect(1, "src/layer/a.cc:1: no-shared-mode")
        self.write("src/core/shared_facts.h", "bool f(SharedMode m) { return m == SharedMode::kAdd; }\n")
        self.write("src/layer/a.cc", "spec.shared.mode = SharedMode::kAdd;\n"
                                     "auto facts = shared_facts(spec);\n")
        self.expect(0)

    def test_catalog_that_nothing_asks_fails(self):
        self.write("src/comm/catalog.cc", "\nCatalog<Row> all_rows() { return rows; }\n")
        self.write("src/comm/a.cc", "auto rows = all_rows();\n")
        self.expect(1, "src/comm/catalog.cc:2: catalog-in-use")
        self.write("src/layer/a.cc", "// all_rows()\n")
        self.expect(1, "src/comm/catalog.cc:2: catalog-in-use")
        self.write("src/layer/a.cc", "auto row = all_rows().find(name);\n")
        self.expect(0)

    def test_allow_list_needs_a_reason(self):
        self.write("src/core/a.cc", "void f() { std::abort(); }\n")
        self.write("tools/check_rules.allow", "no-exit src/core/a.cc  # a fork guard\n")
        self.expect(0)
        self.write("tools/check_rules.allow", "no-exit src/core/a.cc\n")
        self.expect(1, "expected 'rule path  # reason'")

    def test_long_files_are_reported_only(self):
        self.write("src/core/a.cc", "int x;\n" * 401)
        status, output = self.check("check_rules.py", "--sizes")
        self.assertEqual(status, 0, output)
        self.assertIn("401 lines", output)


class CheckIncludes(CheckCase):
    def expect(self, status: int, text: str):
        found, output = self.check("check_includes.py")
        self.assertEqual(found, status, output)
        self.assertIn(text, output)

    def test_headers_in_reach_pass(self):
        self.write("include/conclave/a.h", "#include <string>\n#include <vector>\n")
        self.write("src/core/b.h", '#include "conclave/a.h"\n#include <fmt/core.h>\n')
        self.write("src/core/b.cc", '#include "core/b.h"\nstd::vector<std::string_view> all;\n'
                                    'auto text = fmt::format("{}", 1);\n')
        self.write("tests/core/b_test.cc", '#include "core/b.h"\n// std::map\n'
                                           'auto text = "std::map of std::string";\n')
        self.expect(0, "are in reach")

    def test_forgotten_header_fails(self):
        for line, header in (("std::vector<int> a;", "vector"), ("bool b = std::isnan(1.0);", "cmath"),
                             ("auto p = std::make_unique<int>();", "memory"),
                             ("void f(int32_t);", "cstdint"), ("auto t = fmt::format(s);", "fmt/format.h"),
                             ("TEST(A, B) {}", "gtest/gtest.h")):
            with self.subTest(header=header):
                self.write("src/core/a.cc", f"#include <iterator>\n{line}\n")
                self.expect(1, f"src/core/a.cc:2: include <{header}>")

    def test_header_of_another_project_counts_for_nothing(self):
        self.write("tests/core/a_test.cc", "#include <gtest/gtest.h>\nstd::vector<int> a;\n")
        self.expect(1, "tests/core/a_test.cc:2: include <vector>")

    def test_the_nearest_of_two_headers_counts(self):
        self.write("src/core/a.h", "#include <map>\n")
        self.write("tests/core/a.h", "")
        self.write("tests/core/a_test.cc", '#include "core/a.h"\nstd::map<int, int> a;\n')
        self.expect(1, "tests/core/a_test.cc:2: include <map>")

    def test_precompiled_header_that_the_table_does_not_know_fails(self):
        self.write("cmake/Precompile.cmake", "# conclave_precompile(<target> <header>...)\n"
                                             "set(CONCLAVE_STANDARD_HEADERS\n    <vector> <regex>)\n")
        self.expect(1, "<regex> is precompiled")
        self.write("cmake/Precompile.cmake", "conclave_precompile(conclave <vector> <fmt/format.h>)\n")
        self.expect(0, "are in reach")


@unittest.skipUnless(shutil.which("g++"), "needs g++")
class CheckHeaders(CheckCase):
    def test_self_contained_header_passes(self):
        self.write("include/conclave/a.h", "#pragma once\n#include <vector>\nstd::vector<int> f();\n")
        status, output = self.check("check_headers.py", "--compiler", "g++")
        self.assertEqual(status, 0, output)

    def test_header_that_needs_another_first_fails(self):
        self.write("include/conclave/a.h", "#pragma once\nstd::vector<int> f();\n")
        status, output = self.check("check_headers.py", "--compiler", "g++")
        self.assertEqual(status, 1)
        self.assertIn("conclave/a.h alone", output)

    @unittest.skipUnless(shutil.which("clang++-16"), "needs clang++-16")
    def test_header_that_another_compiler_refuses_fails(self):
        self.write("include/conclave/a.h", "#pragma once\ninline int f(int a) { return a; }\n")
        self.write("include/conclave/b.h", "#pragma once\n#ifdef __clang__\n#error no\n#endif\n")
        status, output = self.check("check_headers.py", "--compiler", "g++", "--compiler", "clang++-16")
        self.assertEqual(status, 1)
        self.assertIn("clang++-16: all together", output)
        self.assertIn("conclave/b.h", output)

    def test_foreign_include_fails(self):
        self.write("include/conclave/a.h", "#pragma once\n#include <nlohmann/json.hpp>\n")
        status, output = self.check("check_headers.py", "--compiler", "g++")
        self.assertEqual(status, 1)
        self.assertIn("include/conclave/a.h:2: includes nlohmann/json.hpp", output)

    def test_header_of_the_c_interface_that_is_no_c_fails(self):
        self.write("include/conclave/c/a.h", "#pragma once\nint f(bool x);\n")
        status, output = self.check("check_headers.py", "--compiler", "g++")
        self.assertEqual(status, 1)
        self.assertIn("gcc: conclave/c/a.h alone", output)

    def test_include_of_cpp_in_the_c_interface_fails(self):
        self.write("include/conclave/c.h", "#pragma once\n#include <cstdint>\n")
        status, output = self.check("check_headers.py", "--compiler", "g++")
        self.assertEqual(status, 1)
        self.assertIn("include/conclave/c.h:2: includes cstdint", output)


if __name__ == "__main__":
    unittest.main()
