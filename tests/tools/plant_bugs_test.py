"""A campaign over a library of one function: what is found, survives, or does not compile."""

import fnmatch
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from planting.build_tree import BuildTree  # noqa: E402
from planting.campaign import Campaign  # noqa: E402
from planting.faults import Fault, problems, read_catalog  # noqa: E402
from planting.library import read_filters  # noqa: E402
from planting.programs import Selection  # noqa: E402

FILES = {
    "CMakeLists.txt": """
cmake_minimum_required(VERSION 3.25)
project(planted CXX)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
find_package(GTest REQUIRED)
add_library(conclave STATIC src/core/twice.cc)
target_include_directories(conclave PUBLIC src)
add_executable(core_test tests/core/twice_test.cc)
set_target_properties(core_test PROPERTIES RUNTIME_OUTPUT_DIRECTORY tests/core)
target_link_libraries(core_test conclave GTest::gtest_main)
""",
    "src/core/twice.h": "inline int factor() { return 2; }\nint twice(int x);\n",
    "src/core/twice.cc": '#include "core/twice.h"\nint twice(int x) { return factor() * x; }\n',
    "tests/core/twice_test.cc": '#include "core/twice.h"\n#include <gtest/gtest.h>\n'
    "TEST(Twice, OfThree) { EXPECT_EQ(twice(3), 6); }\n"
    "TEST(Twice, OfOne) { EXPECT_GT(twice(1), 1); }\n"
    "TEST(Twice, FailsAlways) { EXPECT_EQ(twice(0), 1); }\n",
}


CASES = ROOT / "tools" / "planting"
# A test of googletest: its suite and its own name.
DECLARED = re.compile(r"\b(?:TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P)\(\s*(\w+),\s*(\w+)\)")


def declared_tests() -> list[str]:
    """Suite.Name of every test in C++."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.cc"))
    return [f"{suite}.{name}" for suite, name in DECLARED.findall(text)]


def pattern_of(part: str) -> str:
    """A part of googletest's filter for Suite.Name, without what parameters add to both ends."""
    if "." not in part:
        return part
    before, after = part.split(".", 1)
    after = after.split("/", 1)[0]
    # A star within may stand for the end of the name and the start of a parameter.
    return f"{before.rsplit('/', 1)[-1]}.{after.split('*', 1)[0]}{'*' if '*' in after else ''}"


def words_of(expression: str) -> list[str]:
    """The names in what pytest's -k takes."""
    return [word for word in re.findall(r"\w+", expression) if word not in ("and", "or", "not")]


def fault(name: str, file: str, old: str, new: str) -> Fault:
    return Fault(name=name, area="self", kind="class", file=file, old=old, new=new)


class Planting(unittest.TestCase):
    def test_catalog_is_whole(self):
        faults = read_catalog()
        self.assertGreater(len(faults), 100)
        self.assertEqual(problems(faults), [])

    def test_gone_and_unchanged_text_are_problems(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "one.h").write_text("int one();\n")
            found = problems(
                [
                    fault("sound", "one.h", "int", "long"),
                    fault("gone", "one.h", "two", "three"),
                    fault("same", "one.h", "one", "one"),
                    fault("no file", "two.h", "a", "b"),
                ],
                root,
            )
        self.assertEqual(len(found), 3, found)
        self.assertIn("self/gone: one.h holds the old text 0 times", found[0])
        self.assertIn("self/same: the new text is the old one", found[1])
        self.assertIn("two.h", found[2])

    def test_old_text_must_be_there_once(self):
        with self.assertRaisesRegex(ValueError, "0 times"):
            fault("x", "README.md", "no such " + "text", "").planted(ROOT)

    def test_filters_are_of_faults_and_join_by_program(self):
        faults = [fault("a", "x", "1", "2"), fault("b", "x", "1", "2")]
        row = {"key": "self/a", "program": "tests/x_test", "filter": "A.One"}
        rows = [row, {**row, "filter": "A.Two"}, {**row, "under": ["tool", "-x"]}]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "filters.json"
            path.write_text(json.dumps(rows))
            self.assertEqual(
                read_filters(path, faults),
                {
                    "self/a": [
                        Selection("tests/x_test", "A.One:A.Two"),
                        Selection("tests/x_test", "A.One", ("tool", "-x")),
                    ]
                },
            )
            path.write_text(json.dumps([{**row, "key": "self/c"}]))
            with self.assertRaisesRegex(ValueError, "self/c"):
                read_filters(path, faults)

    def test_every_fault_has_a_case(self):
        faults = read_catalog()
        for name, is_own in (
            ("cpu_cases.json", lambda each: not each.is_cuda and not each.is_python),
            ("cuda_cases.json", lambda each: each.is_cuda),
            ("python_cases.json", lambda each: each.is_python),
        ):
            with self.subTest(name):
                self.assertEqual(
                    set(read_filters(CASES / name, faults)),
                    {each.key for each in faults if is_own(each)},
                )

    def test_every_case_names_a_test(self):
        declared = declared_tests()
        for name in ("cpu_cases.json", "cuda_cases.json"):
            for row in json.loads((CASES / name).read_text()):
                folder, program = row["program"].rsplit("/", 1)
                self.assertRegex((ROOT / folder / "CMakeLists.txt").read_text(), rf"\b{program}\b")
                for part in row["filter"].split(":"):
                    self.assertTrue(fnmatch.filter(declared, pattern_of(part)), row)

    def test_every_case_of_python_names_a_test(self):
        for row in json.loads((CASES / "python_cases.json").read_text()):
            files = [ROOT / file for file in row["program"].split()]
            names = [
                name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())
            ]
            for word in words_of(row["filter"]):
                self.assertTrue(any(word in name for name in names), (word, row))

    def test_parts_of_filters_are_patterns_of_declared_tests(self):
        for part, pattern in (
            ("*", "*"),
            ("*Panel*", "*Panel*"),
            ("Suite.*", "Suite.*"),
            ("Suite.Name", "Suite.Name"),
            ("Catalog/Suite.Name/kernel", "Suite.Name"),
            ("*Suite.Name*/*avx2*", "*Suite.Name*"),
            ("*Suite.Na*static*", "*Suite.Na*"),
        ):
            self.assertEqual(pattern_of(part), pattern)

    def run_campaign(self, root: pathlib.Path, faults: list[Fault], chosen=None) -> Campaign:
        """Measures and runs the campaign over the library of one function, built first."""
        for name, text in FILES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        build = root / "build"
        subprocess.run(
            ["cmake", "-S", root, "-B", build, "-G", "Ninja"], check=True, stdout=subprocess.DEVNULL
        )
        subprocess.run(["ninja", "-C", build], check=True, stdout=subprocess.DEVNULL)
        campaign = Campaign(
            BuildTree(root, build),
            faults,
            root / "work",
            jobs=2,
            gpu_jobs=1,
            deadline=time.monotonic() + 200,
            chosen=chosen,
            say=lambda text: None,
        )
        campaign.measure(["tests/core/core_test"])
        campaign.run()
        return campaign

    @unittest.skipIf(shutil.which("ninja") is None, "no ninja")
    def test_chosen_cases_alone_are_run(self):
        sees, fails, other, absent = (
            Selection("tests/core/core_test", cases)
            for cases in ("Twice.OfThree", "Twice.FailsAlways", "Twice.OfOne", "Twice.NoSuchCase")
        )
        faults = [
            fault(name, "src/core/twice.cc", "factor() * x", "factor() + x")
            for name in ("seen", "passed over", "without a case")
        ]
        faults.append(fault("unseen", "src/core/twice.cc", "factor() * x", "x * factor()"))
        chosen = {
            "self/seen": [fails, other, sees],
            "self/passed over": [other],
            "self/without a case": [absent],
            "self/unseen": [other],
        }
        with tempfile.TemporaryDirectory() as folder:
            campaign = self.run_campaign(pathlib.Path(folder).resolve(), faults, chosen)
        whole = Selection("tests/core/core_test")
        self.assertEqual(set(campaign.baseline), {sees, other, whole})
        results = {each.fault.name: each for each in campaign.results.values()}
        self.assertEqual(
            {name: each.status for name, each in results.items()},
            {
                "seen": "found",
                "passed over": "found",
                "without a case": "unfinished",
                "unseen": "survived",
            },
        )
        # What its own case passed over, another of the module saw.
        for name in ("seen", "passed over"):
            self.assertEqual(results[name].case, "Twice.OfThree")
        self.assertEqual(results["unseen"].passed, [str(other), str(whole)])

    @unittest.skipIf(shutil.which("ninja") is None, "no ninja")
    def test_campaign(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            faults = [
                fault("source", "src/core/twice.cc", "factor() * x", "factor() + x"),
                fault("a header's", "src/core/twice.h", "return 2", "return 3"),
                fault("same", "src/core/twice.cc", "factor() * x", "x * factor()"),
                fault("crash", "src/core/twice.cc", "return", "__builtin_trap(); return"),
                fault("text", "src/core/twice.cc", "factor() * x", "factor( * x"),
            ]
            campaign = self.run_campaign(root, faults)
            self.assertEqual(
                campaign.baseline[Selection("tests/core/core_test")].failing, ("Twice.FailsAlways",)
            )
            results = {each.fault.name: each for each in campaign.results.values()}
            self.assertEqual(
                {name: each.status for name, each in results.items()},
                {
                    "source": "found",
                    "a header's": "found",
                    "same": "survived",
                    "crash": "found",
                    "text": "broken",
                },
            )
            self.assertEqual(results["source"].case, "Twice.OfThree")
            self.assertEqual(results["crash"].how, "crashed")
            for name, text in FILES.items():
                self.assertEqual((root / name).read_text(), text, "the tree was changed")


if __name__ == "__main__":
    unittest.main()
