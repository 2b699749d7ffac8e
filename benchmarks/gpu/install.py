"""Installs what `benchmarks.gpu.package` packed, the parts beside this file, and prints what TensorFlow finds.

`python3 .gpu/install.py FOLDER && . FOLDER/environment`. Needs Python's standard library and xz.
"""

import glob
import os
import shlex
import subprocess
import sys
from pathlib import Path

# The versions of CUDA's libraries that TensorFlow opens, by the end of their names.
LIBRARIES = {"cudart": 12, "cublas": 12, "cublasLt": 12, "cufft": 11, "cusolver": 11, "cusparse": 12, "cudnn": 9}
LIBRARIES |= {"nccl": 2, "cupti": 12}
CHECK = """
import tensorflow as tf
x = tf.ones([64, 64], tf.bfloat16)
print(f"TensorFlow {tf.__version__}: {tf.config.list_physical_devices('GPU')}, 64 = {(x @ x)[0, 0]:g}")
"""


def main() -> None:
    here, folder = Path(__file__).resolve().parent, Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    parts = shlex.join(sorted(map(str, here.glob("part-*"))))
    subprocess.run(f"cat {parts} | XZ_OPT=-T0 tar -xJ -C {folder}", shell=True, check=True)
    (folder / "crankshaft").symlink_to(here.parent)  # the repository, under the package's name
    places = [f"{path}/nvidia/*/lib" for path in (str(folder), *sys.path)]
    places += ["/usr/local/cuda*/lib64", "/usr/lib/x86_64-linux-gnu"]
    libraries = folder / "libraries"
    libraries.mkdir()
    folders = [str(libraries)]
    for name, version in LIBRARIES.items():
        found = [path for place in places for path in sorted(glob.glob(f"{place}/lib{name}.so.*"))]
        chosen = next((path for path in found if path.endswith(f".so.{version}")), found[0] if found else None)
        print(f"{name} {version}: {chosen or 'missing'}")
        if chosen:
            (libraries / f"lib{name}.so.{version}").symlink_to(chosen)
            folders.append(os.path.dirname(os.path.realpath(chosen)))
    compiler = folder / "nvidia" / "cuda_nvcc"
    variables = {
        "PYTHONPATH": f"{folder}",
        "LD_LIBRARY_PATH": ":".join(dict.fromkeys(folders)),
        "PATH": f"{compiler}/bin:{os.environ['PATH']}",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={compiler}",
    }
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    (folder / "environment").write_text("".join(lines), encoding="utf-8")
    subprocess.run([sys.executable, "-c", CHECK], env={**os.environ, **variables}, check=True)


if __name__ == "__main__":
    main()
