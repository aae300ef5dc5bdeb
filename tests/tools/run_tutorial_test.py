"""tools/run_tutorial.py passes a page that does what it shows, and no other."""

import pathlib
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import run_tutorial  # noqa: E402

PAGE = """# Title

```python title="part/add.py"
print(1 + 1, "is   two")
print("a (b) [c]")
```

```sh
python3 part/add.py
ls -d testdata/models
```

```text
2 is two
a ... [c]
```

```sh title="not run by tests"
exit 1
```
"""


class RunTutorial(unittest.TestCase):
    def run_page(self, page: str, timeout: float = 60) -> list:
        with tempfile.TemporaryDirectory() as name:
            return run_tutorial.run_page(page, pathlib.Path(name), timeout)

    def refuse(self, page: str, words: str, timeout: float = 60) -> None:
        self.assertNotEqual(page, PAGE)
        with self.assertRaisesRegex(run_tutorial.TutorialError, words):
            self.run_page(page, timeout)

    def test_a_right_page_passes(self):
        self.assertEqual(self.run_page(PAGE), ["2 is   two\na (b) [c]\ntestdata/models\n"])

    def test_a_wrong_program_command_or_output_fails(self):
        self.refuse(PAGE.replace("1 + 1", "1 + 2"), "has no line '2 is two'")
        self.refuse(PAGE.replace("1 + 1", "1 +"), "line 8: exit status 1")
        self.refuse(PAGE.replace("ls -d testdata/models", "ls testdata/no-such"), "line 8: exit status 2")
        self.refuse(PAGE.replace("python3 part/add.py", "no-such-program | cat"), "line 8: exit status 127")
        self.refuse(PAGE.replace("2 is two", "is two"), "has no line 'is two'")
        self.refuse(PAGE.replace("a ... [c]", "a ... c"), "has no line 'a ... c'")
        self.refuse(PAGE.replace("2 is two\na ... [c]", "a ... [c]\n2 is two"), "has no line '2 is two' there")

    def test_nothing_is_shown_that_does_not_run(self):
        self.refuse(PAGE + "```cpp\nint x;\n```\n", "a block of 'cpp' is neither a file nor run")
        self.refuse(PAGE + "```\nplain\n```\n", "a block of '' is neither")
        self.refuse(PAGE + "  ```sh\n  exit 1\n  ```\n", "a fence is indented")
        self.refuse(PAGE + '```sh linenums="1"\nexit 1\n```\n', "a fence is indented, not closed, or has other")
        self.refuse(PAGE + "```sh\nexit 1\n", "not closed")
        self.refuse(PAGE + "~~~sh\nexit 1\n~~~\n", "a fence is")
        self.refuse("```text\nwords\n```\n", "an output without commands")
        self.refuse("# Title\n", "runs nothing")
        self.refuse(PAGE.replace("part/add.py", "../add.py", 1), "lies elsewhere")

    def test_a_command_that_hangs_is_ended(self):
        start = time.monotonic()
        self.refuse("```sh\nsleep 60\n```\n", "exit status no", timeout=0.2)
        self.assertLess(time.monotonic() - start, 30)

    def test_what_a_block_left_running_ends_with_it(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            run_tutorial.run_page("```sh\nsleep 60 & echo $! > id.txt\n```\n", folder, 60)
            id_of = (folder / "id.txt").read_text().strip()
            for _ in range(100):  # it is gone, or waits for its parent to ask
                status = pathlib.Path(f"/proc/{id_of}/stat")
                if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
                    return
                time.sleep(0.05)
            self.fail("a process outlived its block")


if __name__ == "__main__":
    unittest.main()
