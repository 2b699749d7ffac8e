"""`crankshaft report`: a result as Markdown, whatever it holds, and one line for what is not a result."""

import json

import pytest

from crankshaft.launch.benchmark import report, schema
from tests.launch.benchmark.results import MORE, RESULT


def test_a_report_has_every_section_of_a_result_as_tables(tmp_path, capsys):
    result = {"schema": schema.VERSION, "command": "crankshaft train --a", **RESULT, **MORE}
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit) as end:
        report.main(["crankshaft report", str(tmp_path / "result.json")])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "$ crankshaft train --a" in text
    assert "| steps/s | 4,000 |" in text
    assert "| mlp/[a] | MatMul | 0.1 | 40.0% |" in text
    assert "- the load before the run was 3.2 [sic]" in text


def test_a_hostile_name_stays_in_its_cell():
    ops = [{"name": "a|b", "type": "MatMul", "ms_per_step": 1.0, "share": 1.0}]
    assert r"| a\|b | MatMul | 1 | 100.0% |" in report.markdown({"profile": {"ops": ops}})


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "can't be read"), ("{", "can't be read"), ("[]", "is of schema None"), ('{"schema": "x/9"}', "schema x/9")],
)
def test_what_is_not_a_result_is_one_line(tmp_path, capsys, content, says):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as end:
        report.main(["crankshaft report", str(path)])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert "give a file of --result_json" in line


def test_other_arguments_are_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        report.main(["crankshaft report"])
    assert end.value.code == 2
    assert "0 arguments; use crankshaft report RESULT.json" in capsys.readouterr().err
