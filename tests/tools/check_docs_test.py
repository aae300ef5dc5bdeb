"""tools/check_docs.py catches what it is for, and passes what is right."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools/check_docs.py"

HEADER = "enum class ErrorCode : int32_t {\n  kShape = 104,\n  kDType = 105,  // why\n};\n"
ERRORS = "| 104 | `kShape` | cause | remedy |\n| 105 | `kDType` | cause | remedy |\n"


class CheckDocs(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)
        self.write("include/conclave/error.h", HEADER)
        self.write("docs/errors.md", ERRORS)
        self.write("docs/adr/0001-why.md", "# Why\n")
        self.write("docs/adr/README.md", "[Why](0001-why.md)\n")

    def write(self, name: str, text: str):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def expect(self, status: int, text: str):
        result = subprocess.run([sys.executable, TOOL, self.root], capture_output=True, text=True,
                                check=False)
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        self.assertIn(text, result.stdout)

    def test_right_tree_passes(self):
        self.write("docs/errors.md", ERRORS + "## 1xx: what `create` finds\n")
        self.write("docs/p.svg", "<svg/>")
        self.write("README.md", "[errors](docs/errors.md#1xx-what-create-finds) `docs/adr` [web](https://a.b/c#d)\n"
                                "# A_b-c d\n[here](#a_b-c-d) ![picture](docs/p.svg)\n"
                                "```\n[not a link](nowhere.md) `src/nowhere.cc`\n```\n")
        self.expect(0, "are right")

    def test_code_without_row_fails(self):
        self.write("docs/errors.md", ERRORS.splitlines()[0] + "\n")
        self.expect(1, "kDType = 105 has no row")

    def test_wrong_number_fails(self):
        self.write("docs/errors.md", ERRORS.replace("| 105 |", "| 106 |"))
        self.expect(1, "docs/errors.md:2: errors: kDType is 105, the page says 106")

    def test_row_without_code_fails(self):
        self.write("docs/errors.md", ERRORS + "| 199 | `kGone` | cause | remedy |\n")
        self.expect(1, "kGone is not an ErrorCode")

    def test_row_without_remedy_does_not_count(self):
        self.write("docs/errors.md", ERRORS.replace("`kDType` | cause | remedy |", "`kDType` | |  |"))
        self.expect(1, "kDType = 105 has no row")

    def test_link_out_of_the_site_fails(self):
        self.write("bench/results/today.md", "# Today\n")
        self.write("docs/page.md", "[record](../bench/results/today.md) `bench/results/today.md`\n")
        self.expect(1, "docs/page.md:1: links: ../bench/results/today.md is no page of the site")

    def test_dead_link_fails(self):
        self.write("HACKING.md", "\n[gone](docs/gone.md)\n")
        self.expect(1, "HACKING.md:2: links: docs/gone.md is not there")

    def test_dead_picture_fails(self):
        self.write("README.md", "![seen](docs/gone.svg)\n")
        self.expect(1, "README.md:1: links: docs/gone.svg is not there")

    def test_link_to_no_heading_fails(self):
        self.write("README.md", "\n[why](docs/adr/0001-why.md#why) [how](docs/adr/0001-why.md#how) [self](#here)\n")
        self.expect(1, "README.md:2: links: docs/adr/0001-why.md#how is no heading of that page")
        self.expect(1, "README.md:2: links: #here is no heading of that page")
        self.write("README.md", "```\n# here\n```\n[self](#here)\n")
        self.expect(1, "README.md:4: links: #here is no heading")

    def test_path_that_moved_fails(self):
        self.write("docs/architecture.md", "see `src/layer/gone.cc`\n")
        self.expect(1, "docs/architecture.md:1: paths: src/layer/gone.cc is not there")

    def test_unlisted_record_fails(self):
        self.write("docs/adr/0002-how.md", "# How\n")
        self.expect(1, "0002-how.md is not listed")

    def test_number_used_twice_fails(self):
        self.write("docs/adr/0001-again.md", "# Again\n")
        self.expect(1, "has the same number")


if __name__ == "__main__":
    unittest.main()
