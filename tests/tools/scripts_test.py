"""scripts/run and scripts/test: options, the package step, and what they say when it fails."""

import os
import pathlib
import re
import shutil
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

    def run_script(self, *command: str, root: pathlib.Path = ROOT) -> tuple[int, str]:
        environment = os.environ | {"PATH": f"{self.fake_bin}:{os.environ['PATH']}"}
        result = subprocess.run([root / "scripts" / command[0], *command[1:]], env=environment,
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
        status, output = self.run_script("test", "--only", "rules", root=self.tree_with_checks("exit 0"))
        self.assertEqual(status, 0, output)
        self.assertIn("packages are installed", output)
        self.assertEqual(output.splitlines()[-1], "1 passed, 0 failed")
        self.assertRegex(output, r"\nrules +ok +[0-9.]+ s +[0-9.]+ s")
        self.assertRegex(output, r"\ntotal [0-9.]+ s, [0-9.]+ s of processor time\n")

    def test_step_that_fails_shows_its_log_and_what_to_do(self):
        self.fake("dpkg-query", "echo -n installed")
        root = self.tree_with_checks("echo a.cc:3: no-names; exit 1")
        status, output = self.run_script("test", "--only", "rules", root=root)
        self.assertEqual(status, 1, output)
        self.assertIn("a.cc:3: no-names", output)
        self.assertRegex(output, r"failed: rules \(build/logs/rules.log\): each line names the file")
        self.assertEqual(output.splitlines()[-1], "0 passed, 1 failed")

    def tree_with_checks(self, body: str) -> pathlib.Path:
        """The scripts, beside checks that read no sources: those are steps of their own."""
        root = self.fake_bin / "tree"
        shutil.copytree(ROOT / "scripts", root / "scripts")
        (root / "tools").mkdir()
        for name in re.findall(r"tools/check_\w+\.py", (ROOT / "scripts/test").read_text(encoding="utf-8")):
            self.fake(f"tree/{name}", body)
        return root

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
        release = self.fake_bin / "release-tests.xml"
        release.write_text(
            "<system-out>[ RUN      ] Catalog/RowRunsHere.WithinBound/cpu_avx512_bf16\n"
            "[  SKIPPED ] Catalog/RowRunsHere.WithinBound/cpu_avx512_bf16 (0 ms)\n"
            "[  SKIPPED ] Catalog/RowRunsHere.WithinBound/cpu_amx (0 ms)\n"
            "[  SKIPPED ] Catalog/CodedBatchRow.AnyBatch_HasTheBitsOfTheReference/cpu_amx (0 ms)\n"
            "[  FAILED  ] Catalog/RowRunsHere.WithinBound/cpu_avx2, where GetParam() = 1 (3 ms)\n"
            "[       OK ] Catalog/RowRunsHere.WithinBound/cpu_scalar (3 ms)\n"
            "[  SKIPPED ] Catalog/Elsewhere.WithinBound/cpu_neon (0 ms)\n"
            "[  SKIPPED ] 4 tests, listed below:\n"
            "[  SKIPPED ] Catalog/RowRunsHere.WithinBound/cpu_amx\n</system-out>", encoding="utf-8")
        other = self.fake_bin / "dev-tests.xml"
        other.write_text("[  SKIPPED ] Catalog/RowRunsHere.WithinBound/cpu_avx512_vnni (0 ms)\n"
                         "[  SKIPPED ] Catalog/RowRunsHere.WithinBound/cpu_amx (0 ms)\n",
                         encoding="utf-8")
        status, output = self.run_script("rows_not_run", str(release), str(other))
        self.assertEqual(status, 0)
        self.assertEqual(output, "not run here: cpu.amx\nnot run here: cpu.avx512_bf16\n"
                                 "not run here: cpu.avx512_vnni\n")
        self.assertEqual(self.run_script("rows_not_run"), (0, ""))

    def cases(self, *entries: tuple[str, str, str]) -> list[str]:
        """What is said of a report with these entries: name, attributes and elements, output."""
        report = self.fake_bin / "report.xml"
        bodies = (f'<testcase name="{name}" status={rest}<system-out>{output}</system-out></testcase>'
                  for name, rest, output in entries)
        report.write_text(f"<testsuite>{''.join(bodies)}</testsuite>", encoding="utf-8")
        result = subprocess.run(["python3", ROOT / "scripts" / "count_cases.py", str(report)],
                                capture_output=True, text=True, check=True)
        return result.stdout.splitlines()

    def test_cases_of_a_program_are_counted(self):
        ran = ("[==========] Running 3 tests from 1 test suite.\n"
               "[ RUN      ] All/A.B/0\n[       OK ] All/A.B/0 (0 ms)\n"
               "[ RUN      ] All/A.B/1\n[  SKIPPED ] All/A.B/1 (0 ms)\n"
               "[ RUN      ] All/A.B/2\n[  FAILED  ] All/A.B/2, where GetParam() = 2 (11 ms)\n"
               "[  PASSED  ] 1 test.\n[  SKIPPED ] 1 test, listed below:\n[  SKIPPED ] All/A.B/1\n"
               "[  FAILED  ] 1 test, listed below:\n[  FAILED  ] All/A.B/2, where GetParam() = 2\n")
        self.assertEqual(self.cases(("a_test.1", '"fail"><failure message=""/>', ran)),
                         ["failed: All/A.B/2 in a_test.1", "1 cases passed, 1 failed, 1 skipped"])
        self.assertEqual(self.cases(("a_test.2", '"run">', "[==========] Running 0 tests from 0 test suites.")),
                         ["0 cases passed, 0 failed, 0 skipped"])

    def test_ranks_that_run_a_case_count_once(self):
        passed, failed = "[       OK ] A.B (1 ms)\n", "[  FAILED  ] A.B (1 ms)\n"
        self.assertEqual(self.cases(("ranks.3", '"run">', passed * 3)), ["1 cases passed, 0 failed, 0 skipped"])
        self.assertEqual(self.cases(("ranks.3", '"fail">', passed + failed + passed)),
                         ["failed: A.B in ranks.3", "0 cases passed, 1 failed, 0 skipped"])

    def test_case_that_ends_its_program_is_named(self):
        output = "[ RUN      ] A.B\n[       OK ] A.B (1 ms)\n[ RUN      ] A.C\n"
        self.assertEqual(self.cases(("a_test.1", '"fail">', output)),
                         ["failed: A.C in a_test.1", "1 cases passed, 1 failed, 0 skipped"])
        self.assertEqual(self.cases(("a_test.1", '"fail">', output + "[       OK ] A.C (1 ms)\na leak")),
                         ["failed: a_test.1", "2 cases passed, 1 failed, 0 skipped"])

    def test_entry_that_is_no_program_of_cases_is_one(self):
        def lacking(why: str) -> str:
            return f'"notrun"><skipped message="{why}"/>'
        self.assertEqual(
            self.cases(("a", '"run">', "2 passed"), ("b", '"fail">', ""), ("c", '"disabled">', "Disabled"),
                       ("d", lacking("SKIP_RETURN_CODE=77"), ""), ("e", lacking("Fixture dependency failed"), ""),
                       ("f", lacking("SKIP_REGULAR_EXPRESSION_MATCHED"), ""),
                       ("g", lacking("Unable to find executable"), "")),
            ["failed: b", "failed: e", "failed: g", "1 cases passed, 3 failed, 3 skipped"])

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
