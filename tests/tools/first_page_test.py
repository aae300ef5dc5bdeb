"""README.md and docs/features.md: what a reader sees first, and that every feature names what holds it."""

import pathlib
import re
import sys
import textwrap
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import run_tutorial  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
FEATURES = (ROOT / "docs/features.md").read_text(encoding="utf-8")
STATE = re.compile(r"^(done|partial|missing)\b")
FIRST_SCREEN = 40  # lines
LONGEST = 90  # letters of what a row of the README says of a feature


def rows_of(page: str, head: str) -> list:
    """(section, cells) of each row of the tables that begin with this line."""
    section, rows, inside = "", [], False
    for line in page.splitlines():
        if line.startswith("## "):
            section = line[3:]
        if line == head:
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if cells[0].startswith("**"):
                section = cells[0].strip("* ")
            else:
                rows.append((section, cells))
    return rows


class FirstPage(unittest.TestCase):
    def test_the_first_screen_has_both_commands_and_an_output(self):
        screen = "\n".join(README.splitlines()[:FIRST_SCREEN])
        for wanted in ("# Conclave\n", "    scripts/run ", "    scripts/test ", "```text\n", "\nok: "):
            self.assertIn(wanted, screen)

    def test_every_block_is_run_or_an_output(self):
        # Those of Python are run by python/tests/test_tutorials.py.
        languages = [block.language for block in run_tutorial.blocks_of(README)]
        self.assertEqual(set(languages), {"text", "python", "cpp"})

    def test_the_code_of_cpp_is_that_of_an_example(self):
        blocks = [block.body for block in run_tutorial.blocks_of(README) if block.language == "cpp"]
        example = (ROOT / "examples/first_layer.cc").read_text(encoding="utf-8")
        marked = re.findall(r"^ *// README.md: begin\n(.*?)^ *// README.md: end\n", example, re.MULTILINE | re.DOTALL)
        self.assertEqual(len(marked), len(blocks))
        for block, lines in zip(blocks, marked):
            includes, code = block.split("\n\n", 1)
            self.assertEqual(code, textwrap.dedent(lines))
            for include in includes.splitlines():
                self.assertIn(f"\n{include}\n", example)

    def test_rows_of_the_readme_are_short_and_lead_on(self):
        rows = rows_of(README, "| | state | more |")
        self.assertGreater(len(rows), 30)
        for section, cells in rows:
            with self.subTest(cells[0]):
                what, state, more = cells
                self.assertRegex(state, STATE)
                self.assertLessEqual(len(what), LONGEST)
                self.assertLessEqual(len(state), LONGEST)
                self.assertRegex(more, r"^\[[^\]]+\]\(docs/[^)]+\)$")  # check_docs.py sees that it is there
                self.assertTrue(section)

    def test_rows_of_features_name_what_holds_them(self):
        rows = rows_of(FEATURES, "| what | state | held by |")
        self.assertGreater(len(rows), 30)
        for _, cells in rows:
            with self.subTest(cells[0]):
                what, state, held = cells
                self.assertTrue(what)
                self.assertRegex(state, STATE)
                paths = re.findall(r"`([\w./-]+/[\w./-]+)`", held)
                tests = [path for path in paths if re.match(r"(tests|python/tests|examples)/", path)]
                self.assertTrue(tests, "a row names a test")
                for path in paths:
                    self.assertTrue((ROOT / path).exists(), path)

    def test_both_tables_have_the_same_sections(self):
        sections = [list(dict.fromkeys(section for section, _ in rows)) for rows in (
            rows_of(README, "| | state | more |"), rows_of(FEATURES, "| what | state | held by |"))]
        self.assertEqual(*sections)

    def test_what_is_missing_in_full_is_missing_in_brief(self):
        """A section of the full table with a row that is not done has one in the README too."""
        brief, full = ({section for section, cells in rows_of(page, head) if not cells[1].startswith("done")} for page, head in (
            (README, "| | state | more |"), (FEATURES, "| what | state | held by |")))
        self.assertEqual(brief, full)


if __name__ == "__main__":
    unittest.main()
