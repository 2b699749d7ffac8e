"""What a shell is answered that completes a command line."""

import pytest

from crankshaft.launch import complete


def answered(capsys, monkeypatch, line: str, *words: str) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    with pytest.raises(SystemExit) as exit:
        complete.main(["crankshaft complete", *words])
    assert exit.value.code == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [
        ("crankshaft tr", "tr", ["train"]),
        ("crankshaft train --train_s", "--train_s", ["--train_steps="]),
        ("crankshaft train --restore", "--restore", ["--restore_best"]),
        ("crankshaft local --work", "--work", ["--workers="]),
        ("crankshaft local --workers=2 -- --train_s", "--train_s", ["--train_steps="]),
        # bash takes "=" for the end of a word.
        ("crankshaft train --model=ml", "ml", ["mlp"]),
        ("crankshaft train --precision=b", "b", ["bfloat16"]),
        ("crankshaft train --data_dir=/", "/", []),
        ("crankshaft train --nosuch=", "", []),
    ],
)
def test_bash_is_answered_what_may_stand_there(capsys, monkeypatch, line, word, expected):
    assert answered(capsys, monkeypatch, line, "crankshaft", word, "before") == expected


def test_zsh_which_gives_no_word_is_answered_whole_words(capsys, monkeypatch):
    assert answered(capsys, monkeypatch, "crankshaft train --model=ml") == ["--model=mlp"]
    assert "--model=" in answered(capsys, monkeypatch, "crankshaft train ")
