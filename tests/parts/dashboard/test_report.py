"""`crankshaft report`: runs as a table, a result as Markdown, both as a page; each mistake is one line."""

import json
import os
import re
import subprocess

import pytest

from benchmarks.monitor_page import events, write
from crankshaft.engine.machine.threads import pid_space
from crankshaft.launch import command
from crankshaft.runner.results import SCHEMA
from tests.parts.dashboard.test_result_text import MORE, RESULT
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
    path.write_text(json.dumps({"schema": SCHEMA, "command": "crankshaft train --a\x1b]0;b\x07", **RESULT, **MORE}))
    code, text, _ = reported(path)
    assert code == 0
    assert "$ crankshaft train --a\\x1b]0;b\\x07" in text
    assert "| steps/s | 4,000 |" in text
    assert "| mlp/[a] | MatMul | 0.1 | 40.0% |" in text
    assert "| warning | the load before the run was 3.2 [sic] |" in text


def test_runs_and_results_are_written_as_one_page(tmp_path, reported):
    write(tmp_path / "run" / "events.jsonl", events(0))
    path = tmp_path / "rate.json"
    path.write_text(json.dumps({"schema": SCHEMA, **RESULT, **MORE, "command": "</script>"}))
    code, text, _ = reported(tmp_path / "run", path, f"--html={tmp_path}/both.html")
    assert (code, text) == (0, f"written to {tmp_path}/both.html\n")
    page = (tmp_path / "both.html").read_text()
    assert page.count("</script>") == 3
    held = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [each["name"] for each in held["runs"]] == ["run", "rate.json"]
    assert held["runs"][0]["view"]["windows"]["step"][-1] == 20_000
    assert ["steps/s", "4,000"] in held["runs"][1]["view"]["result"]["sections"][1]["rows"]


def test_a_folder_of_runs_is_a_table_and_each_is_named_by_what_differs_in_its_path(tmp_path, reported, monkeypatch):
    write(tmp_path / "sweep" / "a" / "run" / "events.jsonl", events(0))
    gone = {"pid": 2**22 + 1, "pid_space": pid_space()}
    write(tmp_path / "sweep" / "b" / "run" / "events.jsonl", ({**line, **gone} for line in [*events(1)][:-1]))
    (tmp_path / "sweep" / "a" / "run" / "result.json").write_text("{}")
    known = {"mode": "train_and_eval", "model": "mlp", "run_dir": "gone", "step": 7, "train": {"loss": 0.5}}
    best = {"metric": "eval_loss", "value": 2.402e-05, "step": 5}
    (tmp_path / "copy.json").write_text(json.dumps({**known, "best": best, "stop": None}))
    monkeypatch.chdir(tmp_path)
    code, text, _ = reported("sweep")
    head, first, second = (re.split(r"  +", line) for line in text.splitlines())
    assert code == 0
    assert head == ["run", "started", "steps", "best", "learning_rate", "seed", "state"]
    assert [first[0], *first[2:]] == ["a", "20,000", first[3], "0.001", "0", "ended: complete"]
    assert [second[0], second[2], *second[4:6]] == ["b", "20,000", "0.002", "1"]
    assert second[6].startswith("was killed, or its machine stopped, at 2023-11-1")
    assert re.fullmatch(r"eval_loss 0\.\d+", first[3])
    # A run's result stands for its run, and a copy of one elsewhere for itself.
    assert reported("sweep/a/run/result.json")[1].splitlines()[1].split()[0] == "run"
    _, text, _ = reported("sweep", "copy.json")
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["sweep/a/run", "sweep/b/run", "copy.json"]
    assert re.split(r"  +", text.splitlines()[3]) == [
        "copy.json",
        "–",
        "7",
        "eval_loss 2.402e-05",
        "–",
        "–",
        "ended: done",
    ]
    _, text, _ = reported("copy.json")
    assert "| best | eval_loss 2.402e-05 at step 5 |" in text
    _, text, _ = reported("sweep", "copy.json", "--html=both.html")
    page = (tmp_path / "both.html").read_text()
    held = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"]
    assert [run["name"] for run in held] == ["sweep/a/run", "sweep/b/run", "copy.json"]
    assert [run.get("state", [""])[0][:5] for run in held] == ["ended", "was k", ""]
    assert held[0]["view"]["best"]["direction"] == "min"


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path, reported):
    """As /dev/stdout, which is a link to a pipe."""
    write(tmp_path / "run" / "events.jsonl", events(0))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    code, _, error = reported(tmp_path / "run", f"--html={tmp_path}/link")
    assert (code, ["nobody reads it" in line for line in error]) == (1, [True])
    has_reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        try:
            code, *_ = reported(tmp_path / "run", f"--html={tmp_path}/link")
            assert (code, (tmp_path / "link").is_symlink()) == (0, True)
            os.close(has_reader)
            assert reader.communicate(timeout=PATIENCE)[0].startswith(b"<!doctype html>")
        finally:
            reader.kill()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is not there"),
        ("{", "can't be read"),
        ("[]", "is of schema None"),
        ('{"schema": "x/9"}', "schema x/9"),
        (json.dumps({"schema": SCHEMA, "steps": "many", "wall_seconds": 1}), "holds a value of a wrong type"),
        (
            json.dumps({"schema": SCHEMA, "steps": 1, "wall_seconds": 10**400}),
            "holds a value of a wrong type",
        ),
        (json.dumps({"schema": SCHEMA, "interval": []}), "holds a value of a wrong type"),
    ],
)
def test_what_is_not_a_result_is_one_line(tmp_path, reported, content, says):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    code, _, (line,) = reported(path)
    assert code == 2
    assert says in line
    assert "a file of result_json" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the run's folder is missing; name it: crankshaft report RUN_DIR"),
        (["a", "b"], "a is not there; give a run's folder on this machine"),
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
