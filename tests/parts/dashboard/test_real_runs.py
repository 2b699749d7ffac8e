"""The page in a real browser, on records of real runs of several processes, live and ended."""

import os
import re
import signal

import pytest

from benchmarks.browser import monitor
from crankshaft.engine.record.events import read
from tests.launch.conftest import MLP, Crank
from tests.runs import newest

pytestmark = pytest.mark.slow
RUN = (*MLP, "--progress=plain", "--checkpoint_every_steps=200", "--eval_every_steps=200")
TABLE = ("--model=wide_deep", "--input=synthetic_clicks", "--input_arg=examples=20000", "--jit=off", "--progress=off")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """`cluster(name, *flags)`: a run on a cluster of this machine, and its run_dir; it ends with the module."""
    folder = tmp_path_factory.mktemp("clusters")
    programs = Crank(folder)

    def start(name: str, *flags: str):
        return programs.start(*flags, f"--run_dir={folder / name}", command="local"), folder / name

    yield start
    programs.end()


def lanes(page) -> dict[str, int]:
    """How many figures of all have a curve in each worker's lane."""
    found: dict[str, int] = {}
    for name in page.eval_on_selector_all("#figure option", "options => options.map(each => each.value)"):
        page.select_option("#figure", name)
        for row in page.query_selector_all("#lanes tr"):
            worker = row.query_selector("th").inner_text()
            found[worker] = found.get(worker, 0) + (row.query_selector("canvas") is not None)
    return found


def test_a_stopped_worker_is_red_until_it_goes_on_and_a_restart_is_on_the_time_axis(cluster, opened):
    program, run_dir = cluster("step", "--workers=2", "--", *RUN, "--train_steps=1000000")

    def send(number: signal.Signals) -> None:
        os.kill(int(re.findall(r"worker 1 is process (\d+)", program.out + program.err)[-1]), number)

    program.until(lambda: newest(run_dir) >= 200)
    with monitor(run_dir) as link:
        page = opened(link)
        page.locator("#lanes tr.runs").nth(1).wait_for()
        send(signal.SIGSTOP)
        page.locator("#lanes tr.stopped", has_text=re.compile("worker 1.*does not answer")).wait_for()
        send(signal.SIGCONT)
        page.locator("#lanes tr.stopped").wait_for(state="detached")
        send(signal.SIGKILL)
        page.locator("#facts", has_text="worker 1 was killed by SIGKILL").wait_for()
        page.locator("#lanes tr.runs").nth(1).wait_for()
        program.send(signal.SIGTERM)
        assert program.wait().code == 143
        page.locator("#news", has_text="ended: SIGTERM").wait_for()
        found = lanes(page)
        assert set(found) == {"worker 0", "worker 1"}
        assert min(found.values()) >= 4  # the norm is there once a step was looked at
        assert page.inner_text("#notes-table").count("\trestart\t") == 1
        rows = {row.split("\t")[0]: row.split("\t")[2] for row in page.inner_text("#spent-table").splitlines()[1:]}
        assert {"steps", "start", "down", "waiting"} <= set(rows)
        assert sum(float(share.removesuffix(" %")) for share in rows.values()) == pytest.approx(100, abs=1)
        (end,) = [line.event for line in read(run_dir / "events.jsonl") if line.kind == "end"][-1:]
        assert rows["steps"] == f"{100 * end['goodput']['share']:.1f} %"
        assert page.locator("#servers").is_hidden()
    assert [error for error in opened.errors if "ERR_CONNECTION" not in error] == []


def test_parameter_servers_are_shown_with_their_tables_and_the_staleness_of_updates(cluster, opened):
    program, run_dir = cluster("servers", "--workers=2", "--ps=2", "--", *TABLE, "--train_steps=1000000")
    program.until(lambda: newest(run_dir) > 0)
    with monitor(run_dir) as link:
        page = opened(link)
        page.locator("#lanes tr.runs").nth(1).wait_for()
        worker = int(re.findall(r"worker 1 is process (\d+)", program.out + program.err)[-1])
        os.kill(worker, signal.SIGSTOP)
        page.locator("#lanes tr.stopped", has_text="worker 1").wait_for()
        page.locator("#notes-table", has_text="worker 1 does not answer").wait_for()
        os.kill(worker, signal.SIGCONT)
        page.locator("#lanes tr.stopped").wait_for(state="detached")
        server = int(re.findall(r"ps 1 is process (\d+)", program.out + program.err)[-1])
        for number, red in ((signal.SIGSTOP, "does not answer"), (signal.SIGCONT, ""), (signal.SIGKILL, "lost|killed")):
            os.kill(server, number)
            if number == signal.SIGSTOP:
                page.locator("#news", has_text="ps 1 stopped").wait_for()
            if red:
                page.locator("#servers tr.stopped", has_text=re.compile(f"ps 1.*({red})")).wait_for()
            else:
                page.locator("#servers tr.stopped").wait_for(state="detached")
            assert page.locator("#servers tr", has_text="ps 0").get_attribute("class") != "stopped"
        page.locator("#servers tr.runs").nth(1).wait_for()  # all have been restarted
        program.send(signal.SIGTERM)
        assert program.wait().code == 143
        page.locator("#news", has_text="ended: SIGTERM").wait_for()
        page.wait_for_selector("#staleness-chart canvas")
        _, *servers = [row.split("\t") for row in page.inner_text("#servers-table").splitlines()]
        assert [name for name, *_ in servers] == ["ps 0", "ps 1"]
        for _, state, seconds, size, _ in servers:
            assert state == "ended"
            assert float(seconds) >= 0
            assert float(size) > 0
        assert re.search(r"embedding [\d,]+", " ".join(rows for *_, rows in servers))  # one shard, as it is small
        found = lanes(page)
        assert set(found) == {"worker 0", "worker 1"}
        assert min(found.values()) >= 4
        assert {"staleness, updates", "lag, steps"} <= set(page.inner_text("#figure").splitlines())
    assert [error for error in opened.errors if "ERR_CONNECTION" not in error] == []
