"""scripts/run and scripts/test: options, the package step, and what they say when it fails."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Scripts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.fake_bin = pathlib.Path(folder.name)

    def fake(self, name: str, body: str):
        path = self.fake_bin / name
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def run_script(self, *command: str) -> tuple[int, str]:
        environment = os.environ | {"PATH": f"{self.fake_bin}:{os.environ['PATH']}"}
        result = subprocess.run([ROOT / "scripts" / command[0], *command[1:]], env=environment,
                                stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                check=False)
        return result.returncode, result.stdout + result.stderr

    def test_help_lists_the_options(self):
        for script, option in (("run", "--no-bench"), ("test", "--only")):
            status, output = self.run_script(script, "--help")
            self.assertEqual(status, 0)
            self.assertIn(option, output)

    def test_unknown_option_is_named(self):
        for script in ("run", "test"):
            status, output = self.run_script(script, "--frobnicate")
            self.assertEqual(status, 1)
            self.assertIn("unknown option '--frobnicate'", output)

    def test_unknown_step_lists_the_steps(self):
        status, output = self.run_script("test", "--only", "nope")
        self.assertEqual(status, 1)
        self.assertIn("release-tests", output)

    def test_threads_wants_a_number(self):
        status, output = self.run_script("run", "--threads", "many")
        self.assertEqual(status, 1)
        self.assertIn("found 'many'", output)

    def test_failed_installation_says_what_to_do(self):
        self.fake("dpkg-query", "exit 1")
        self.fake("apt-get", "echo 'E: no such mirror'; exit 100")
        self.fake("sudo", '[ "$1" = -n ] && shift; exec "$@"')
        status, output = self.run_script("run")
        self.assertEqual(status, 1)
        self.assertIn("installing: ccache cmake", output)
        self.assertIn("E: no such mirror", output)
        self.assertIn("install by hand: ccache", output)

    def test_installed_packages_leave_the_network_alone(self):
        self.fake("dpkg-query", "echo -n installed")
        self.fake("apt-get", "exit 100")
        status, output = self.run_script("test", "--only", "rules")
        self.assertEqual(status, 0, output)
        self.assertIn("packages are installed", output)
        self.assertEqual(output.splitlines()[-1], "1 passed, 0 failed")
        self.assertRegex(output, r"\nrules +ok +[0-9.]+ s +[0-9.]+ s")
        self.assertRegex(output, r"\ntotal [0-9.]+ s, [0-9.]+ s of processor time\n")

    def library(self, command: str) -> str:
        return subprocess.run(["bash", "-c", f". '{ROOT}/scripts/lib.sh'; {command}"], text=True,
                              capture_output=True, check=True).stdout

    def test_progress_says_how_far_and_how_long(self):
        for line, expected in (
                ("[66/264] Building CXX object a.o", " 25 %, 66 of 264 steps, 30 s, about 90 s left"),
                (" 50/200 Test  #7: A.B .... Passed", " 25 %, 50 of 200 tests, 30 s, about 90 s left"),
                ("..........s..... [ 25%]", " 25 %, 30 s, about 90 s left"),
                ("-- Configuring done", "-- Configuring done")):
            self.assertEqual(self.library(f"progress_of '{line}' 30").rstrip("\n"), expected)

    def test_processor_time_has_that_of_children(self):
        spent = self.library("bash -c 'for ((i = 0; i < 300000; ++i)); do :; done'; cpu_seconds")
        self.assertGreater(float(spent), 0.1)

    def torch_report(self, *cases: str) -> str:
        path = self.fake_bin / "report.xml"
        path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>",
                        encoding="utf-8")
        return str(path)

    def torch_tests(self, *arguments: str) -> tuple[int, str]:
        result = subprocess.run(["python3", ROOT / "scripts" / "torch_tests.py", *arguments],
                                capture_output=True, text=True, check=False)
        return result.returncode, result.stdout

    def test_rows_that_the_machine_lacks_are_named_once(self):
        release = self.fake_bin / "release-tests.log"
        release.write_text(
            "        Start 412: Catalog/RowRunsHere.WithinBound/cpu_amx\n"
            " 412/5012 Test #412: Catalog/RowRunsHere.WithinBound/cpu_amx ....***Skipped   0.01 sec\n"
            "The following tests did not run:\n"
            "\t409 - Catalog/RowRunsHere.WithinBound/cpu_avx512_bf16 (Skipped)\n"
            "\t412 - Catalog/RowRunsHere.WithinBound/cpu_amx (Skipped)\n"
            "\t600 - Catalog/CodedBatchRow.AnyBatch_HasTheBitsOfTheReference/cpu_amx (Skipped)\n"
            "\t700 - Catalog/RowRunsHere.WithinBound/cpu_avx2 (Failed)\n"
            "\t701 - Catalog/Elsewhere.WithinBound/cpu_neon (Skipped)\n"
            "\t702 - tools.make_published (Skipped)\n", encoding="utf-8")
        other = self.fake_bin / "dev-tests.log"
        other.write_text("\t3 - Catalog/RowRunsHere.WithinBound/cpu_avx512_vnni (Skipped)\n"
                         "\t9 - Catalog/RowRunsHere.WithinBound/cpu_amx (Skipped)\n",
                         encoding="utf-8")
        status, output = self.run_script("rows_not_run", str(release), str(other))
        self.assertEqual(status, 0)
        self.assertEqual(output, "not run here: cpu.amx\nnot run here: cpu.avx512_bf16\n"
                                 "not run here: cpu.avx512_vnni\n")
        self.assertEqual(self.run_script("rows_not_run"), (0, ""))

    def test_rows_are_named_by_cases_that_there_are(self):
        script = (ROOT / "scripts" / "rows_not_run").read_text(encoding="utf-8")
        suites = re.search(r"cases='\(([A-Za-z|]+)\)", script).group(1).split("|")
        sources = "".join(path.read_text(encoding="utf-8")
                          for path in (ROOT / "tests" / "experts").glob("*_test.cc"))
        for suite in suites:
            self.assertIn(f"INSTANTIATE_TEST_SUITE_P(Catalog, {suite},", sources)
        self.assertIn("scripts/rows_not_run", (ROOT / "scripts" / "test").read_text(encoding="utf-8"))

    def test_skipped_torch_tests_fail_where_they_are_required(self):
        ran = '<testcase classname="python.tests.test_cuda_calls" name="a"/>'
        missing = ('<testcase classname="python.tests.test_cuda_calls" name="b">'
                   '<skipped message="torch is not installed"/></testcase>')
        other = ('<testcase classname="python.tests.test_cuda_calls" name="c">'
                 '<skipped message="torch has no CUDA device"/></testcase>')
        report = self.torch_report(ran, missing, other)
        self.assertEqual(self.torch_tests(report)[0], 0)
        status, output = self.torch_tests(report, "--require")
        self.assertEqual(status, 1)
        self.assertIn("1 of 3 tests ran in files that use it, 1 skipped", output)
        self.assertEqual(self.torch_tests(self.torch_report(ran, other), "--require")[0], 0)
        self.assertEqual(self.torch_tests(self.torch_report(), "--require")[0], 1)


if __name__ == "__main__":
    unittest.main()
