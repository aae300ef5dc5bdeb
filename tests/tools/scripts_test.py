"""scripts/run and scripts/test: options, the package step, and what they say when it fails."""

import os
import pathlib
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


if __name__ == "__main__":
    unittest.main()
