"""The catalog of faults: one TOML file an area, one table a fault."""

import dataclasses
import pathlib
import tomllib

FOLDER = pathlib.Path(__file__).resolve().parent / "faults"
ROOT = FOLDER.parent.parent.parent


@dataclasses.dataclass(frozen=True)
class Fault:
    """One replacement in one file. `kind` is its class, such as "tail" or "missing check"."""

    name: str
    area: str
    kind: str
    file: str
    old: str
    new: str

    @property
    def key(self) -> str:
        return f"{self.area}/{self.name}"

    @property
    def is_cuda(self) -> bool:
        return "/cuda/" in self.file

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py")

    def planted(self, root: pathlib.Path) -> str:
        """The file's text with the fault in it."""
        sound = (root / self.file).read_text()
        if sound.count(self.old) != 1:
            raise ValueError(
                f"{self.key}: {self.file} holds the old text "
                f"{sound.count(self.old)} times, not once: mend the catalog"
            )
        return sound.replace(self.old, self.new)


def read_area(path: pathlib.Path) -> list[Fault]:
    tables = tomllib.loads(path.read_text())["fault"]
    return [
        Fault(
            name=table["name"],
            area=path.stem,
            kind=table["class"],
            file=table["file"],
            old=table["old"].strip("\n"),
            new=table["new"].strip("\n"),
        )
        for table in tables
    ]


def read_catalog(folder: pathlib.Path = FOLDER) -> list[Fault]:
    faults = [fault for path in sorted(folder.glob("*.toml")) for fault in read_area(path)]
    names = [fault.key for fault in faults]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"names that occur twice: {', '.join(twice)}")
    return faults


def problems(faults: list[Fault], root: pathlib.Path = ROOT) -> list[str]:
    """What is wrong with the catalog against the tree: texts that are gone, faults that change nothing."""
    found = []
    for fault in faults:
        try:
            if fault.planted(root) == (root / fault.file).read_text():
                found.append(f"{fault.key}: the new text is the old one")
        except (OSError, ValueError) as error:
            found.append(str(error))
    return found
