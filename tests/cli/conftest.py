import pytest
from typer.testing import CliRunner

from lowbit_attn.cli.console import console
from lowbit_attn.cli.main import app


@pytest.fixture
def run(monkeypatch):
    """Runs a command in this process; its result has exit_code, stdout and stderr."""
    monkeypatch.setattr(console, "width", 200)  # no table cell is broken over lines

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke
