"""A finished build folder, read so that single objects and test programs can be made anew.

Nothing in the tree or the build folder changes: a planted file lies in an overlay whose folders come
first in the include path, and its object is linked before the library, whose own copy of it the
linker then does not take.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess


TOOL = "apps/conclave/conclave"


class Failed(Exception):
    """A compiler or a linker said no."""


def run_tool(command: list[str], folder: pathlib.Path, limit: float) -> None:
    environment = {**os.environ, "CCACHE_DISABLE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, text=True, errors="replace", timeout=limit, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"ran for more than {limit:.0f} s: {' '.join(command[:3])}") from None
    if done.returncode != 0:
        raise Failed(done.stdout[-3000:])


def archive_of(made: str) -> str:
    """The archive of an object's target, if that target makes one."""
    folder, target = re.match(r"(.*?)CMakeFiles/([^/]+)\.dir/", made).groups()
    return f"{folder}lib{target}.a"


def output_of(command: str) -> str:
    words = shlex.split(command)
    return words[words.index("-o") + 1]


class BuildTree:
    """Objects, what they include, and how test programs are linked."""

    def __init__(self, root: pathlib.Path, folder: pathlib.Path) -> None:
        self.root = root
        self.folder = folder
        self.commands: dict[str, str] = {}
        self.sources: dict[str, str] = {}
        for entry in json.loads((folder / "compile_commands.json").read_text()):
            made = output_of(entry["command"])
            self.commands[made] = entry["command"]
            self.sources[made] = os.path.realpath(entry["file"])
        self.users = self._read_users()
        self.links = self._read_links()
        self.programs = {target: link for target, link in self.links.items() if target != TOOL}

    def _ninja(self, *arguments: str) -> str:
        return subprocess.run(
            ["ninja", "-C", str(self.folder), "-t", *arguments],
            text=True, capture_output=True, check=True,
        ).stdout

    def _read_users(self) -> dict[str, set[str]]:
        """The objects that each file of the tree is part of, by its path beneath the root."""
        users: dict[str, set[str]] = {}
        made = None
        prefix = str(self.root) + os.sep
        for line in self._ninja("deps").splitlines():
            if line and not line.startswith(" "):
                made = line.split(":", 1)[0]
            elif line.strip() and made in self.commands:
                path = os.path.normpath(self.folder / line.strip())
                if path.startswith(prefix):
                    users.setdefault(path[len(prefix):], set()).add(made)
        for made, source in self.sources.items():
            if source.startswith(prefix):
                users.setdefault(source[len(prefix):], set()).add(made)
        return users

    def _read_links(self) -> dict[str, str]:
        """The link command of each test program and of the tool, by its path beneath the build
        folder."""
        programs = {}
        for line in self._ninja("targets", "all").splitlines():
            target, _, rule = line.partition(": ")
            if "EXECUTABLE_LINKER" not in rule or not target.startswith(("tests/", TOOL)):
                continue
            steps = self._ninja("commands", "-s", target).strip().split(" && ")
            link = [step for step in steps if f"-o {target}" in step]
            if len(link) == 1 and (target == TOOL or "gtest" in link[0]):
                programs[target] = link[0]
        return programs

    def concerned(self, file: str) -> tuple[list[str], dict[str, list[str]]]:
        """Objects of archives that programs link, and each program's own, that hold the file."""
        users = sorted(self.users.get(file, ()))
        links = {program: set(link.split()) for program, link in self.programs.items()}
        archives = set().union(*links.values())
        return ([made for made in users if archive_of(made) in archives],
                {program: [made for made in users if made in words]
                 for program, words in links.items()})

    def compile(self, made: str, overlay: pathlib.Path, file: str, limit: float) -> pathlib.Path:
        """The object `made` with the overlay's file in the place of the tree's."""
        target = overlay / "objects" / made
        target.parent.mkdir(parents=True, exist_ok=True)
        words = shlex.split(self.commands[made])
        at = words.index("-o")
        words[at + 1] = str(target)
        depends = pathlib.Path(f"{target}.d")
        for option in ("-MF", "-MT"):
            if option in words:
                del words[words.index(option):words.index(option) + 2]
        words += ["-MD", "-MF", str(depends)]
        if self.sources[made] == str(self.root / file):
            words = [str(overlay / file) if os.path.realpath(self.folder / word) == self.sources[made]
                     else word for word in words]
        first = next(i for i, word in enumerate(words) if word.startswith(("-I", "-D", "-std", "-O")))
        words[first:first] = [f"-I{overlay}/{folder}" for folder in ("include", "src", "tests", "apps/conclave")]
        run_tool(words, self.folder, limit)
        if f"{overlay.name}/{file}" not in depends.read_text():
            raise Failed(f"{made} was made without the planted {file}")
        return target

    def link(self, program: str, replaced: dict[str, pathlib.Path], target: pathlib.Path,
             limit: float) -> None:
        """Links `program` with the replaced objects: those of its archives first, its own in place."""
        target.parent.mkdir(parents=True, exist_ok=True)
        words = shlex.split(self.links[program])
        own = {made: path for made, path in replaced.items() if made in words}
        words = [str(own.get(word, word)) for word in words]
        words[words.index("-o") + 1] = str(target)
        before = [str(path) for made, path in replaced.items() if archive_of(made) in words]
        first = next(i for i, word in enumerate(words) if word.endswith(".o"))
        words[first:first] = before
        run_tool(words, self.folder, limit)
