"""The command line: commands, messages and exit codes, as a user meets them."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from weftpub import __version__, cli
from weftpub.errors import ConfigError
from weftpub_kernels import PRESETS, KernelError


def raising(error: Exception):
    def command() -> None:
        raise error

    return command


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"], commands={}) == 0
    assert capsys.readouterr().out == f"weftpub {__version__}\n"


def test_presets_as_json_lists_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["presets", "--json"], commands={}) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(PRESETS)
    assert {row["name"]: (row["cpu"], row["publishable"]) for row in rows} == {
        name: (recipe.ieee, recipe.publishable) for name, recipe in PRESETS.items()
    }


def test_presets_as_table_shows_every_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # a terminal as it is opened
    assert cli.run(["presets"], commands={}) == 0
    shown = capsys.readouterr().out
    assert [name for name in PRESETS if name not in shown] == []


@pytest.mark.parametrize("error", [ConfigError("hidden is 200; set 256"), KernelError("no such preset")])
def test_own_errors_are_one_message_and_exit_code_1(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["fail"], commands={"fail": raising(error)}) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"weftpub: {type(error).__name__}: {error}\n"


def test_markup_in_a_message_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    error = ConfigError("shape [1, 256] of tensor [/red]")
    assert cli.run(["fail"], commands={"fail": raising(error)}) == 1
    assert "shape [1, 256] of tensor [/red]" in capsys.readouterr().err


def test_debug_lets_the_traceback_through() -> None:
    with pytest.raises(ConfigError, match="why"):
        cli.run(["--debug", "fail"], commands={"fail": raising(ConfigError("why"))})


def test_a_foreign_error_is_never_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.run(["fail"], commands={"fail": raising(ZeroDivisionError())})


def test_an_unknown_command_and_a_bad_option_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["no-such-command"], commands={}) == 2
    assert cli.run(["presets", "--no-such-option"], commands={}) == 2
    assert "no-such-option" in capsys.readouterr().err


def test_a_command_that_cannot_be_loaded_does_not_take_the_others_down(capsys: pytest.CaptureFixture[str]) -> None:
    points = [
        EntryPoint("broken", "no_such_package.command:run", cli.COMMAND_GROUP),
        EntryPoint("nameless", "weftpub.errors:no_such_name", cli.COMMAND_GROUP),
        EntryPoint("good", "weftpub.errors:ConfigError", cli.COMMAND_GROUP),
    ]
    assert cli.installed_commands(points) == {"good": ConfigError}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "'broken' (no_such_package.command:run)" in said[0]


def test_the_demo_is_an_installed_command() -> None:
    assert "demo" in cli.installed_commands()


def test_asking_for_the_version_loads_neither_torch_nor_a_foreign_system() -> None:
    code = (
        "import sys; from weftpub import cli; code = cli.run(['--version']); "
        "heavy = {'torch', 'sglang', 'megatron', 'awex', 'transformers'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
