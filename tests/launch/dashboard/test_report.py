"""`crankshaft report`: a benchmark's result as Markdown, runs and results as a page; each mistake is one line."""

import json
import os
import subprocess

import pytest

from benchmarks.monitor_page import events, write
from crankshaft.launch import command
from crankshaft.launch.benchmark import result
from tests.launch.benchmark.test_benchmark_report import MORE, RESULT
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough


@pytest.fixture
def reported(capsys):
    """`reported(*arguments)`: (exit code, standard output, the lines of standard error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            command.execute("report", [*map(str, arguments)])
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err.splitlines()

    return run


def test_a_page_at_another_hosts_address_names_the_cure(capsys, tmp_path):
    with pytest.raises(SystemExit) as end:  # 192.0.2.1 is for documentation (RFC 5737)
        command.execute("monitor", ["--bind=192.0.2.1", str(tmp_path)])
    assert end.value.code == 2
    assert "(Cannot assign requested address); --bind=ADDRESS takes another of this host's" in capsys.readouterr().err


def test_a_result_is_printed_with_every_section_as_tables(tmp_path, reported):
    path = tmp_path / "result.json"
    path.write_text(
        json.dumps({"schema": result.VERSION, "command": "crankshaft train --a\x1b]0;b\x07", **RESULT, **MORE})
    )
    code, text, _ = reported(path)
    assert code == 0
    assert "$ crankshaft train --a\\x1b]0;b\\x07" in text
    assert "| steps/s | 4,000 |" in text
    assert "| mlp/[a] | MatMul | 0.1 | 40.0% |" in text
    assert "| warning | the load before the run was 3.2 [sic] |" in text


def test_runs_and_results_are_written_as_one_page(tmp_path, reported):
    write(tmp_path / "run" / "events.jsonl", events(0))
    path = tmp_path / "rate.json"
    path.write_text(json.dumps({"schema": result.VERSION, **RESULT, **MORE, "command": "</script>"}))
    code, text, _ = reported(tmp_path / "run", path, f"--html={tmp_path}/both.html")
    assert (code, text) == (0, f"written to {tmp_path}/both.html\n")
    page = (tmp_path / "both.html").read_text()
    assert page.count("</script>") == 3
    held = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [each["name"] for each in held["runs"]] == ["run", "rate.json"]
    assert held["runs"][0]["view"]["windows"]["step"][-1] == 20_000
    assert ["steps/s", "4,000"] in held["runs"][1]["view"]["result"]["sections"][1]["rows"]


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path, reported):
    """As /dev/stdout, which is a link to a pipe."""
    write(tmp_path / "run" / "events.jsonl", events(0))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        try:
            code, *_ = reported(tmp_path / "run", f"--html={tmp_path}/link")
            assert (code, (tmp_path / "link").is_symlink()) == (0, True)
            assert reader.communicate(timeout=PATIENCE)[0].startswith(b"<!doctype html>")
        finally:
            reader.kill()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can't be read"),
        ("{", "can't be read"),
        ("[]", "is of schema None"),
        ('{"schema": "x/9"}', "schema x/9"),
        (json.dumps({"schema": result.VERSION, "steps": "many", "wall_seconds": 1}), "holds a value of a wrong type"),
        (json.dumps({"schema": result.VERSION, "steps": 1, "wall_seconds": 10**400}), "holds a value of a wrong type"),
        (json.dumps({"schema": result.VERSION, "interval": []}), "holds a value of a wrong type"),
    ],
)
def test_what_is_not_a_result_is_one_line(tmp_path, reported, content, says):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    code, _, (line,) = reported(path)
    assert code == 2
    assert says in line
    assert "give a file of result_json" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "0 paths instead of one; use crankshaft report RESULT.json, or any with --html=FILE"),
        (["a", "b"], "2 paths instead of one"),
        (["."], ". is a run's folder, which is shown as a page; add --html=FILE"),
        (["gone", "--html=page.html"], "gone is not there; give a run's folder on this machine"),
        ([".", "--html=gone/page.html"], "gone"),
        (["--htlm=x"], "htlm is unknown; did you mean html?"),
    ],
)
def test_other_arguments_are_one_line(reported, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, (line,) = reported(*arguments)
    assert code in (1, 2)
    assert says in line
