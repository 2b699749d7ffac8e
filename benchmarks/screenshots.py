"""Takes the guides' pictures of a run's page: two workers train, one is killed, later stopped. In a headless Chromium.

    python -m benchmarks.screenshots --out=docs/images

Prints how long the page took to show that the worker is stopped, and each picture's size.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from PIL import Image

from benchmarks.browser import chromium, monitor
from crankshaft.engine.checkpoints.run_dir import NAMES
from crankshaft.engine.record import events

STEPS = 3000
FLAGS = ["--model=cnn", "--input=digits", "--jit=off", "--progress=plain", f"--train_steps={STEPS}"]
FLAGS += [
    "--learning_rate=5e-5",
    "--eval_every_steps=150",
    "--checkpoint_every_steps=600",
    "--learning_rate_schedule=cosine",
]
_MARGIN = 16  # pixels below a part of the page
_VIEWPORT = {"width": 1200, "height": 1000}


class Training:
    """A run on two workers.

    Args:
      run_dir: of the run, whose name the page shows.
    """

    def __init__(self, run_dir: pathlib.Path):
        self.run_dir = run_dir
        self._output = run_dir.with_suffix(".out")
        command = [sys.executable, "-m", "crankshaft", "local", "--workers=2", "--", *FLAGS]
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen([*command, f"--run_dir={run_dir}"], stdout=output, stderr=output)

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert self._process.poll() is None, self._output.read_text()
            time.sleep(0.05)

    def count(self, kind: str, from_step: int = 0) -> int:
        """Returns how many events of a kind there are at that step or later."""
        path = self.run_dir / NAMES.events
        recorded = events.read(str(path)) if path.exists() else ()
        return sum(line.kind == kind and line.step >= from_step for line in recorded)

    def signal_worker(self, number: signal.Signals) -> None:
        """Sends a signal to worker 1."""
        os.kill(int(re.findall(r"worker 1 is process (\d+)", self._output.read_text())[-1]), number)

    def wait(self) -> None:
        self.until(lambda: self.count("end"))
        self._process.wait()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def training(run_dir: pathlib.Path) -> Iterator[Training]:
    """Trains within the block."""
    run = Training(run_dir)
    try:
        yield run
    finally:
        run.end()


class Camera:
    """Takes each picture light and dark."""

    def __init__(self, browser, link: str, out: pathlib.Path):
        self._out, self.page = out, browser.new_context(viewport=_VIEWPORT, device_scale_factor=1.5).new_page()
        self.page.goto(link)
        self.page.wait_for_selector("#curve-charts canvas")

    def take(self, name: str, part: str | None = None) -> None:
        """Takes a picture of what is seen of the page, or of a part of it."""
        page = self.page
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(300)  # charts are drawn in frames
            path = self._out / f"{name}-{scheme}.png"
            clip = None
            if part:
                page.locator(part).scroll_into_view_if_needed()
                box = page.locator(part).bounding_box()
                clip = {**box, "x": 0, "width": page.viewport_size["width"], "height": box["height"] + _MARGIN}
            picture = Image.open(io.BytesIO(page.screenshot(clip=clip)))
            few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            few.save(path, optimize=True)
            print(f"{path}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the pictures' folder")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        chromium() as browser,
        training(pathlib.Path(folder, "digits")) as run,
    ):
        run.until(lambda: run.count("window", STEPS * 45 // 100))
        run.signal_worker(signal.SIGKILL)
        run.until(lambda: run.count("start") == 2 and run.count("window", STEPS * 8 // 10))
        with monitor(run.run_dir) as link:
            pictures = Camera(browser, link, out)
            pictures.take("run")
            run.signal_worker(signal.SIGSTOP)
            before = time.monotonic()
            pictures.page.wait_for_selector("tr.stopped")
            print(f"a stopped worker is red after {time.monotonic() - before:.1f} s", flush=True)
            pictures.take("workers", part="#workers")
            run.signal_worker(signal.SIGCONT)
        run.wait()


if __name__ == "__main__":
    main()
