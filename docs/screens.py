"""Takes the pictures of docs/ that show pages: those of a run, and of trackers, by a headless Chromium.

python docs/screens.py --work /tmp/screens

Trains `quickstart` twice on two CPU processes, with every tracker that is installed and has a local page (tensorboard,
trackio), which takes five minutes. A second call with the same folder takes the pictures alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.browser import Browser, browser

PICTURES = Path(__file__).parent / "pictures"
ROOT = Path(__file__).parents[1]
WIDTH, COLOURS = 1280, 64
PAGES = {
    "report.png": ("outputs/quickstart/report.html", "h1", 1100),
    "data_page.png": ("outputs/quickstart/data_report.html", "#examples", 760),
}
"""Picture -> page in the work folder, the element at its top, and its height (px)."""


@dataclass(frozen=True)
class Tracker:
    """A tracker's server: the words that start it, the address of its page, and the seconds that it takes to draw."""

    command: tuple[str, ...]
    address: str
    seconds: float


TRACKERS = {
    "tensorboard": Tracker(
        (sys.executable, "-m", "tensorboard.main", "--logdir", "outputs", "--port", "{port}"),
        "/?darkMode=false&tagFilter=loss%7Crate%7Cperplexity%7Cnorm#timeseries",
        60,
    ),
    "trackio": Tracker((sys.executable, "-c", "import trackio; trackio.show(project='support-bot')"), "/", 10),
}


def train(work: Path, trackers: list[str]) -> None:
    """Leaves two runs, which the trackers have."""
    toolkit = [sys.executable, "-m", "toolkit"]
    logging = [f"logging.trackers=[{', '.join(trackers)}]", "logging.project_name=support-bot"]
    logging += ["logging.tracker_settings.trackio.name={run}"] if "trackio" in trackers else []
    slower = ["training.output_dir=outputs/slower", "optimizer.learning_rate=5e-4", "training.num_epochs=3"]
    shutil.copy(ROOT / "recipes/data/requests_held_out.jsonl", work)
    for words in (
        ["train", "quickstart", "--cpu", "2", *(word.format(run="quickstart") for word in logging)],
        ["train", "quickstart", "--cpu", "2", *slower, *(word.format(run="slower") for word in logging)],
    ):
        subprocess.run([*toolkit, *words], cwd=work, env=environment(work), check=True)  # noqa: S603


def environment(work: Path) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "TRACKIO_DIR": f"{work}/trackio", "PYTHONPATH": paths}


@contextmanager
def served(tracker: Tracker, work: Path) -> Iterator[str]:
    """Starts the tracker's server, and yields the address of its page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(port=port) for word in tracker.command]
    told = {"GRADIO_SERVER_PORT": str(port)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    server = subprocess.Popen(words, cwd=work, env=environment(work) | told, **quiet)  # noqa: S603
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(120):
            try:
                urllib.request.urlopen(address, timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        else:
            raise TimeoutError(f"{words}: no answer at {address}")
        yield address + tracker.address
    finally:
        os.killpg(server.pid, 15)
        server.wait()


def keep(tab: Browser, name: str, top: float, height: float) -> None:
    """Writes a picture in few colours, which a fifth of the bytes hold."""
    file = PICTURES / name
    tab.picture(file, top, height)
    Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    work = parser.parse_args().work.resolve()
    trackers = [name for name in TRACKERS if find_spec(name) is not None]
    if not (work / "outputs/slower").exists():
        work.mkdir(parents=True, exist_ok=True)
        train(work, trackers)
    with browser(work / "profile") as tab:
        for name, (page, element, height) in PAGES.items():
            tab.show(work / page, WIDTH, dark=False)
            top = tab.evaluate(f"document.querySelector({element!r}).getBoundingClientRect().top + scrollY")
            keep(tab, name, max(0, top - 40), height)
        for name in trackers:
            with served(TRACKERS[name], work) as address:
                tab.show(address, WIDTH, dark=False)
                time.sleep(TRACKERS[name].seconds)
                keep(tab, f"{name}.png", 0, 900)


if __name__ == "__main__":
    main()
