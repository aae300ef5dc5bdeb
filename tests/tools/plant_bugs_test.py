"""A campaign over a library of one function: what is found, survives, or does not compile."""

import pathlib
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
from planting.faults import Fault, read_catalog  # noqa: E402

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
    "TEST(Twice, FailsAlways) { EXPECT_EQ(twice(0), 1); }\n",
}


def fault(name: str, file: str, old: str, new: str) -> Fault:
    return Fault(name=name, area="self", kind="class", file=file, old=old, new=new)


class Planting(unittest.TestCase):
    def test_catalog_is_whole(self):
        faults = read_catalog()
        self.assertGreater(len(faults), 100)
        for each in faults:
            self.assertTrue((ROOT / each.file).is_file(), each.key)
            self.assertNotEqual(each.old, each.new, each.key)

    def test_old_text_must_be_there_once(self):
        with self.assertRaisesRegex(ValueError, "0 times"):
            fault("x", "README.md", "no such " + "text", "").planted(ROOT)

    def test_campaign(self):
        if shutil.which("ninja") is None:
            self.skipTest("no ninja")
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            for name, text in FILES.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            build = root / "build"
            subprocess.run(["cmake", "-S", root, "-B", build, "-G", "Ninja"], check=True,
                           stdout=subprocess.DEVNULL)
            subprocess.run(["ninja", "-C", build], check=True, stdout=subprocess.DEVNULL)
            faults = [
                fault("source", "src/core/twice.cc", "factor() * x", "factor() + x"),
                fault("header", "src/core/twice.h", "return 2", "return 3"),
                fault("same", "src/core/twice.cc", "factor() * x", "x * factor()"),
                fault("crash", "src/core/twice.cc", "return", "__builtin_trap(); return"),
                fault("text", "src/core/twice.cc", "factor() * x", "factor( * x"),
            ]
            campaign = Campaign(BuildTree(root, build), faults, root / "work", jobs=2, gpu_jobs=1,
                                deadline=time.monotonic() + 200, say=lambda text: None)
            campaign.measure(["tests/core/core_test"])
            self.assertEqual(campaign.baseline["tests/core/core_test"].failing,
                             ("Twice.FailsAlways",))
            results = {each.fault.name: each for each in campaign.run()}
            self.assertEqual({name: each.status for name, each in results.items()},
                             {"source": "found", "header": "found", "same": "survived",
                              "crash": "found", "text": "broken"})
            self.assertEqual(results["source"].case, "Twice.OfThree")
            self.assertEqual(results["crash"].how, "crashed")
            for name, text in FILES.items():
                self.assertEqual((root / name).read_text(), text, "the tree was changed")


if __name__ == "__main__":
    unittest.main()
