import pytest
from typer.testing import CliRunner

from lowbit_attn.cli.main import app


@pytest.fixture
def run():
    """Runs a command in this process; its result has exit_code, stdout and stderr."""

    def invoke(*arguments):
        # Wide, so that no table cell is broken over lines.
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})

    return invoke
