"""Packs TensorFlow for a machine with a GPU that reaches no package index, in parts that can be sent one by one.

    python -m benchmarks.gpu.package .gpu            # 280 MB: the machine has CUDA 13 and cuDNN 9, e.g. PyTorch's
    python -m benchmarks.gpu.package .gpu --cuda     # 550 MB: CUDA 12.5's libraries too

Then send `.gpu/part-*` to the machine, in as many turns as needed, and there, in the repository:

    python3 .gpu/install.py /tmp/gpu && . /tmp/gpu/environment
    python3 -m benchmarks.gpu --minutes=8 --json=$OUT/gpu.json

With 64 MiB a turn that is six turns, or eleven; unpacking takes half a minute. A lease counts all of it. Libraries lose
their symbols, and their code for other GPUs than that of `--arch` (zeros, which pack well). Without `--cuda`,
TensorFlow gets the machine's CUDA 13 under CUDA 12's names. What is packed so was tried on a CPU; `install.py` prints
whether TensorFlow finds the GPU.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import tensorflow as tf

_PLATFORMS = ("2_28", "2_27", "2_17", "2_12", "2_5", "2_24", "2_26", "2_34")
_CUDA = ("nvidia-cuda-runtime-cu12==12.5.82", "nvidia-cuda-cupti-cu12==12.5.82", "nvidia-cuda-nvcc-cu12==12.5.82")
_CUDA_WHOLE = ("nvidia-cublas-cu12==12.5.3.2", "nvidia-cudnn-cu12==9.3.0.75", "nvidia-cuda-nvrtc-cu12==12.5.82")
_LEFT_OUT = ("tensorflow/include", "nvidia/*/include", "clang")
_FATBIN, _CUBIN = 0xBA55ED50, 2  # of the container of kernels, and of an entry with machine code


def keep_architecture(path: Path, arch: int) -> int:
    """Fills a library's kernels for other GPUs with zeros; returns the bytes of those that stay.

    NVIDIA's container: a magic number, two of 16 bits (the second is the header's size) and the entries' size; of each
    entry its kind, version, header's size and size, and at byte 28 of its header the architecture.
    """
    sections = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True).stdout
    row = next((line.split("]")[1].split() for line in sections.splitlines() if " .nv_fatbin " in line), None)
    if row is None:
        return 0
    offset, size = int(row[3], 16), int(row[4], 16)
    kept, at = 0, 0
    with path.open("r+b") as file:
        file.seek(offset)
        content = bytearray(file.read(size))
        while at + 16 <= size:
            magic, _, header, length = struct.unpack_from("<IHHQ", content, at)
            if magic != _FATBIN:
                at += 8  # containers are aligned
                continue
            entry, at = at + header, at + header + length
            while entry < at:
                kind, _, header, length = struct.unpack_from("<HHIQ", content, entry)
                if (kind, struct.unpack_from("<I", content, entry + 28)[0]) == (_CUBIN, arch):
                    kept += length
                else:
                    content[entry + header : entry + header + length] = bytes(length)
                entry += header + length
        file.seek(offset)
        file.write(content)
    return kept


def download(wheels: Path, python: str, *packages: str, needs: bool = False) -> None:
    """Downloads wheels for the machine's Python."""
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in _PLATFORMS] + [
        "--platform=manylinux2014_x86_64"
    ]
    options = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", f"--dest={wheels}"]
    options += [] if needs else ["--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, *platforms, *packages], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the parts; git has to ignore it")
    parser.add_argument("--cuda", action="store_true", help="with CUDA 12.5 and cuDNN 9.3")
    parser.add_argument("--python", default="3.12", help="the machine's (%(default)s)")
    parser.add_argument("--arch", type=int, default=90, help="its GPU's compute capability (%(default)s: Hopper)")
    parser.add_argument("--mib", type=int, default=54, help="of a part (%(default)s)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheels, tree = Path(temporary, "wheels"), Path(temporary, "tree")
        download(
            wheels, arguments.python, f"tensorflow=={tf.__version__}", "tensorboard", "filelock", "rich", needs=True
        )
        download(wheels, arguments.python, *_CUDA, *(_CUDA_WHOLE if arguments.cuda else ()))
        for wheel in wheels.iterdir():
            shutil.unpack_archive(wheel, tree, "zip")
        for path in (path for pattern in _LEFT_OUT for path in tree.glob(pattern)):
            shutil.rmtree(path)
        for path in tree.rglob("*.so*"):
            subprocess.run(["strip", "--strip-unneeded", path], stderr=subprocess.DEVNULL)
            keep_architecture(path, arguments.arch)
        pack = "tar -C {} -c . | xz -T0 -2 | split -b {}M -d - {}/part-"
        subprocess.run(pack.format(tree, arguments.mib, arguments.folder), shell=True, check=True)
    shutil.copy(Path(__file__).with_name("install.py"), arguments.folder)
    for part in sorted(arguments.folder.glob("part-*")):
        print(f"{part}: {part.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
