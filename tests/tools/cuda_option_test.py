"""CONCLAVE_CUDA, which decides when device code is built: every value, with a driver or without, with
nvcc or without. A small project includes the file that reads the option; nothing is built."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    tomllib = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc")
PROJECT = f"""cmake_minimum_required(VERSION 3.25)
project(option LANGUAGES CXX)
include("{ROOT}/cmake/ConclaveCuda.cmake")
message(STATUS "device code: ${{CONCLAVE_HAS_CUDA}}")
message(STATUS "folders for 90a: ${{CONCLAVE_HAS_SM90}}")
"""


class CudaOption(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.kept = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls):
        cls.kept.cleanup()

    def configure(self, value: str, *, driver: str = "", nvcc: bool = False,
                  architectures: str = "90a") -> tuple[int, str]:
        """`driver` is what shows it: "smi", "device", or neither. Without `nvcc` none is found."""
        # Finding out about compilers takes most of a configuration's time: those with nvcc share a
        # folder, and those without it. Nothing that the option's file has cached is kept.
        folder = pathlib.Path(self.kept.name) / ("nvcc" if nvcc else "none")
        folder.mkdir(exist_ok=True)
        (folder / "CMakeLists.txt").write_text(PROJECT, encoding="utf-8")
        command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), "-UCONCLAVE_*",
                   f"-DCONCLAVE_CUDA={value}", f"-DCONCLAVE_CUDA_ARCHITECTURES={architectures}",
                   f"-DCONCLAVE_NVIDIA_SMI={'/bin/true' if driver == 'smi' else 'OFF'}",
                   f"-DCONCLAVE_NVIDIA_DEVICE={'/dev/null' if driver == 'device' else 'OFF'}"]
        if not nvcc:
            command.append("-DCMAKE_CUDA_COMPILER=OFF")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return result.returncode, " ".join((result.stdout + result.stderr).split())

    def expect(self, value: str, text: str, *, device_code: str = "OFF", **machine):
        with self.subTest(value=value, **machine):
            status, output = self.configure(value, **machine)
            self.assertEqual(status, 0, output)
            self.assertIn(text, output)
            self.assertIn(f"device code: {device_code}", output)

    def test_another_value_is_refused(self):
        status, output = self.configure("MAYBE")
        self.assertNotEqual(status, 0)
        self.assertIn("CONCLAVE_CUDA is 'MAYBE': AUTO, DRIVER, ON or OFF", output)

    def test_on_demands_nvcc(self):
        status, output = self.configure("ON", driver="smi")
        self.assertNotEqual(status, 0)
        self.assertIn("CONCLAVE_CUDA=ON: no nvcc", output)

    def test_auto_does_without_nvcc(self):
        self.expect("AUTO", "CUDA: off, no nvcc", driver="smi")

    def test_driver_wants_a_driver_first(self):
        self.expect("DRIVER", "CUDA: off, no NVIDIA driver here; CONCLAVE_CUDA=ON builds")

    def test_driver_with_one_does_without_nvcc(self):
        for driver in ("smi", "device"):
            self.expect("DRIVER", "CUDA: off, no nvcc", driver=driver)

    @unittest.skipUnless(NVCC, "no nvcc")
    def test_nvcc_is_used_where_the_value_allows(self):
        self.expect("ON", "CUDA: 90a", device_code="ON", nvcc=True)
        self.expect("AUTO", "CUDA: 90a", device_code="ON", nvcc=True)
        self.expect("DRIVER", "CUDA: 90a", device_code="ON", nvcc=True, driver="device")

    @unittest.skipUnless(NVCC, "no nvcc")
    def test_folders_for_one_architecture_are_built_where_it_is_listed(self):
        for architectures, text in {"90a": "folders for 90a: ON", "80;90a": "folders for 90a: ON",
                                    "80;89": "folders for 90a: OFF"}.items():
            self.expect("ON", text, device_code="ON", nvcc=True, architectures=architectures)
        self.expect("ON", "CUDA: plain kernels only; CONCLAVE_CUDA_ARCHITECTURES lacks 90a",
                    device_code="ON", nvcc=True, architectures="80;89")
        self.expect("OFF", "folders for 90a: OFF", architectures="90a")

    @unittest.skipUnless(NVCC, "no nvcc")
    def test_no_architecture_is_refused(self):
        status, output = self.configure("ON", nvcc=True, architectures="")
        self.assertNotEqual(status, 0)
        self.assertIn("CONCLAVE_CUDA_ARCHITECTURES is empty", output)

    @unittest.skipUnless(NVCC, "no nvcc")
    def test_nvcc_is_left_alone_where_the_value_forbids(self):
        self.expect("OFF", "device code", nvcc=True, driver="smi")
        self.expect("DRIVER", "no NVIDIA driver here", nvcc=True)

    @unittest.skipUnless(tomllib, "no tomllib")
    def test_pip_asks_for_a_driver(self):
        with open(ROOT / "pyproject.toml", "rb") as file:
            defines = tomllib.load(file)["tool"]["scikit-build"]["cmake"]["define"]
        self.assertEqual(defines["CONCLAVE_CUDA"], {"env": "CONCLAVE_CUDA", "default": "DRIVER"})


if __name__ == "__main__":
    unittest.main()
